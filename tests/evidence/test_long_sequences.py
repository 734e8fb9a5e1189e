"""The study of long sequences at toy lengths: it trains, resumes, and fills its page."""

import pytest
import torch
from safetensors.torch import save_file

from evidence import long_sequences
from evidence.long_sequences import Images, Sizes, align, compare, create_student, network, rows_of, study, write_page
from linvit.analysis.markdown import marks


def noise(count=48):
    generator = torch.Generator().manual_seed(0)
    split = (
        torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator),
        torch.randint(10, (count,), generator=generator),
    )
    return Images(split, split, torch.full((3, 1, 1), 0.5), torch.full((3, 1, 1), 0.25))


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Two students, two short lengths and an untrained teacher; the folder of the page."""
    students = {"linear": ("linear", {}), "mala, blocks": ("mala", {"blocks": (2, 2)})}
    for name, value in {"SIDES": {16: 16, 64: 32}, "STUDENTS": students, "EVIDENCE": tmp_path}.items():
        monkeypatch.setattr(long_sequences, name, value)
    (tmp_path / "teachers").mkdir()
    torch.manual_seed(0)
    save_file(network(64).state_dict(), tmp_path / "teachers" / "vit.safetensors")
    begin, end = marks("long")
    (tmp_path / "long.md").write_text(f"# Long\n\n{begin}\n{end}\n")
    return tmp_path


@pytest.mark.slow
def test_the_study_goes_on_where_it_stopped_and_fills_its_page(toy):
    ledger, sizes = toy / "long.jsonl", Sizes((16, 8), (8, 4, 2), (8, 4, 2))
    study(noise(), toy / "runs", ledger, (16,), sizes)
    first = ledger.read_text()
    study(noise(), toy / "runs", ledger, (16, 64), sizes)
    assert ledger.read_text().startswith(first)
    described = [(row["tokens"], row["aligned"], row["network"]) for row in rows_of(ledger)]
    names = ("softmax", "linear", "mala, blocks")
    assert described == [(tokens, length, name) for tokens, length in ((16, 16), (64, 16), (64, 64)) for name in names]
    assert all(row["error"] == 0 and row["same"] == 1 for row in rows_of(ledger) if row["network"] == "softmax")
    write_page(ledger)
    page = (toy / "long.md").read_text()
    assert (toy / "long.svg").exists()
    assert page.count("| 64 |") == 5  # a row of the teacher, two of each student


def test_alignment_brings_a_student_nearer_to_its_teacher():
    torch.manual_seed(0)
    images, teacher = noise(), network(16).eval()
    for block in teacher.blocks:  # scores that are not equal
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.1)
    students = {"mala, blocks": create_student(teacher, "mala, blocks", {})}
    batches = list(images.batches(*images.train, 16, 48))
    before = compare(teacher, students, batches)["mala, blocks"]["error"]
    align(teacher, students, {"mala, blocks": 1e-3}, images, 48, 4)
    assert compare(teacher, students, batches)["mala, blocks"]["error"] < 0.7 * before
