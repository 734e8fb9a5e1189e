"""The check of a GPU, without one: its page and record, and what "auto" makes of the record."""

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from linvit import kernels
from linvit.bench import gpu
from linvit.bench.exactness import Deviation, WrongResultError
from linvit.bench.gpu import Check, check_gpu
from linvit.bench.rows import Progress
from linvit.kernels import record
from linvit.layers.product import composed
from linvit.ops import linear_attention
from linvit.ops.backend import kernel_for
from linvit_cli import main

GOOD = Check("rala, float32, 9 tokens, width 16", Deviation("output", 1e-7, 2e-7), None)
BAD = Check("mala, float16, 9 tokens, width 16", Deviation("key", 3e-3, 2e-3), "key: error 3.0e-03, allowed 2.0e-03")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
QUERY = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def pretended(monkeypatch, tmp_path):
    """A GPU that is not there, and records of its own."""
    pytest.importorskip("triton")
    monkeypatch.setenv(record.FOLDER, str(tmp_path / "records"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU/80GB")
    card(monkeypatch, (9, 0), 232448)
    monkeypatch.setattr(record, "SHIPPED", tmp_path / "shipped")
    record._warn_once.cache_clear()
    monkeypatch.setattr(kernels, "obstacle", lambda *_, **__: None)
    monkeypatch.setattr(gpu, "BENCHMARKS", {})
    record.forget()
    yield
    record.forget()


def card(monkeypatch, capability, shared):
    properties = SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def now_with(monkeypatch, **changed):
    """This machine with other facts, as if the records had not been read yet."""
    now = {**record.about(), **changed}
    monkeypatch.setattr(record, "about", lambda index=0: now)
    record.forget()


def ship(tmp_path):
    """The user's record ships with the package instead."""
    shutil.move(tmp_path / "records", record.SHIPPED)
    record.forget()


def finding(monkeypatch, *checks):
    monkeypatch.setattr(gpu, "checks", lambda device, progress: list(checks))


def used(causal=False):
    kernel = kernel_for("auto", QUERY, QUERY, QUERY, causal=causal)
    return kernel and kernel.func


def test_the_kernels_are_used_after_they_have_passed(monkeypatch, tmp_path):
    assert used() is None
    finding(monkeypatch, GOOD)
    assert check_gpu(tmp_path) == [GOOD]
    assert used() is kernels.linear_attention
    page = (tmp_path / gpu.PAGE).read_text()
    assert page.startswith("# Some GPU/80GB\n\nThe kernels are exact on this GPU")
    assert "Left out" not in page
    assert "| rala, float32, 9 tokens, width 16 | output | 1.0e-07 | 2.0e-07 | passed |" in page
    with record.trusted(False):
        assert used() is None


def test_one_failure_keeps_them_from_being_used(monkeypatch, tmp_path, capsys):
    finding(monkeypatch, GOOD, BAD)
    assert main(["check-gpu", "--folder", str(tmp_path)]) == 1
    assert used() is None
    (file,) = (tmp_path / "records").iterdir()
    assert json.loads(file.read_text())["failures"] == {BAD.case: BAD.failure}
    printed = capsys.readouterr().out
    assert f"{BAD.case}: key: error 3.0e-03" in printed
    assert "1 of 2 cases passed. The kernels are not exact on this GPU" in printed


def test_a_network_that_is_wrong_with_them_keeps_them_from_being_used_too(monkeypatch, tmp_path):
    def measure(kind, progress, **options):
        raise WrongResultError("ravlt_tiny fused+triton computes a wrong result")

    finding(monkeypatch, GOOD)
    monkeypatch.setattr(gpu, "BENCHMARKS", {"networks": ("model", {})})
    monkeypatch.setattr(gpu.kinds, "measure", measure)
    assert [check.failure for check in check_gpu(tmp_path)] == [None, "ravlt_tiny fused+triton computes a wrong result"]
    assert used() is None
    assert "| benchmark networks | – | – | – | ravlt_tiny fused+triton" in (tmp_path / gpu.PAGE).read_text()


def test_auto_says_once_that_the_kernels_are_off(caplog):
    for causal in (False, True, False):
        assert used(causal) is None
        record.forget()
    (line,) = caplog.records
    assert line.name == "linvit.kernels.record"
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "The Triton kernels are off on Some GPU/80GB: `linvit check-gpu` turns them on if they pass."
    )


def test_auto_says_nothing_where_a_check_would_turn_nothing_on(monkeypatch, tmp_path, caplog):
    with record.trusted(False):
        assert used() is None
    monkeypatch.setattr(record, "machine_obstacle", lambda device: "Triton is not installed")
    assert used() is None
    monkeypatch.setattr(record, "machine_obstacle", lambda device: None)
    finding(monkeypatch, BAD)
    check_gpu(tmp_path)
    assert used() is None
    assert not caplog.records


def test_compiled_programs_read_the_record_while_they_are_traced(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def scaled(x):
        return x * (2 if record.passed(torch.device("cuda", 0), "bidirectional") else 3)

    with caplog.at_level(logging.WARNING):
        assert torch.compile(scaled, backend="eager", fullgraph=True)(torch.ones(1)) == 3
    assert [line.name for line in caplog.records] == ["linvit.kernels.record"]


def test_other_code_of_softmax_attention_asks_for_a_check_of_it_alone(monkeypatch, tmp_path):
    finding(monkeypatch, GOOD)
    check_gpu(tmp_path)
    assert record.passed(CUDA, "softmax")
    now_with(monkeypatch, softmax_backward="other")
    assert not record.passed(CUDA, "softmax")
    assert used() is kernels.linear_attention


def test_a_damaged_record_counts_as_none(monkeypatch, tmp_path):
    finding(monkeypatch, GOOD)
    check_gpu(tmp_path)
    for text in ("{", "[]", "7", '{"passed": true}', '{"about": [], "passed": true}'):
        record.path(record.about()).write_text(text)
        record.forget()
        assert used() is None


def test_without_a_gpu_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check-gpu", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip() == (
        "linvit: torch sees no GPU here: run this on a machine where torch.cuda.is_available() is true."
    )


def test_a_card_too_old_for_triton_is_refused(monkeypatch, tmp_path):
    card(monkeypatch, (6, 1), 49152)
    with pytest.raises(ValueError, match=r"capability is 6\.1, and the kernels need 7\.0 for any dtype"):
        check_gpu(tmp_path)


def test_what_a_card_cannot_run_is_left_out_and_said(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "OPTIONS", {"mala": gpu.OPTIONS["mala"]})
    card(monkeypatch, (7, 5), 65536)
    cases = list(gpu.cases(torch.device("cuda")))
    assert "mala, float32, 20 tokens, width 32" in cases
    assert "mala, float16, 3136 tokens, width 64" in cases
    assert not [case for case in cases if "bfloat16" in case or "width 128" in case]
    finding(monkeypatch, GOOD)
    check_gpu(tmp_path)
    page = (tmp_path / gpu.PAGE).read_text()
    assert (
        "\n\nLeft out: causal attention in torch.float32 at width 32 needs 66,048 bytes of shared memory per program"
        in page
    )
    assert "; the GPU's compute capability is 7.5, and the kernels need 8.0 for torch.bfloat16." in page


class Finished(Progress):
    """Notes groups and rounds."""

    def __init__(self):
        self.groups, self.rounds = [], 0

    def group(self, name, rounds):
        self.groups.append((name, rounds))

    def advance(self):
        self.rounds += 1


def noted(folder, name):
    """A case that leaves a file named by it, and the number of its process."""
    (folder / name).write_text(str(os.getpid()))
    return [Deviation("output", 0.0, 0.0)]


def breaking(folder, name):
    noted(folder, name)
    raise RuntimeError("no such instruction")


def killing(folder, name):
    os._exit(1)


def waiting(folder, name):
    noted(folder, name)
    time.sleep(600)


def with_cases(monkeypatch, folder, *kinds, free=2**31 + 1):
    """Cases "0", "1", … of these kinds, a GPU with room for two processes, and a machine with 16 cores."""
    named = {str(number): partial(kind, folder, str(number)) for number, kind in enumerate(kinds)}
    monkeypatch.setattr(gpu, "cases", lambda device: named)
    monkeypatch.setattr(gpu, "CORES", 16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**40))
    return list(named)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_cases_run_once_in_other_processes_and_failures_end_nothing(monkeypatch, tmp_path):
    names, shown = with_cases(monkeypatch, tmp_path, noted, breaking, noted, breaking, noted), Finished()
    gpu.compile_in_parallel(CUDA, names[:-1], shown)
    assert names_in(tmp_path) == names[:-1]
    processes = {(tmp_path / name).read_text() for name in names[:-1]}
    assert len(processes) <= 2
    assert str(os.getpid()) not in processes
    assert shown.groups == [("compiling in 2 processes", 4)]
    assert shown.rounds == 4
    assert not multiprocessing.active_children()


def test_a_case_that_kills_its_process_ends_nothing(monkeypatch, tmp_path):
    names = with_cases(monkeypatch, tmp_path, killing, noted, killing)
    gpu.compile_in_parallel(CUDA, names, Progress())


@pytest.mark.parametrize(
    ("device", "cores", "kinds", "free"),
    [(CPU, 16, 2, 2**40), (CUDA, 1, 2, 2**40), (CUDA, 16, 1, 2**40), (CUDA, 16, 2, 2**31 - 1)],
    ids=["no GPU", "one core", "one case", "a full GPU"],
)
def test_nothing_is_started_where_it_saves_nothing(monkeypatch, tmp_path, device, cores, kinds, free):
    names, shown = with_cases(monkeypatch, tmp_path, *[noted] * kinds, free=free), Finished()
    monkeypatch.setattr(gpu, "CORES", cores)
    gpu.compile_in_parallel(device, names, shown)
    assert not names_in(tmp_path)
    assert not shown.groups


def test_ctrl_c_ends_the_processes(monkeypatch, tmp_path):
    class Pressed(Progress):
        def advance(self):
            raise KeyboardInterrupt

    names = with_cases(monkeypatch, tmp_path, noted, waiting, waiting)  # two processes: one waits at least
    with pytest.raises(KeyboardInterrupt):
        gpu.compile_in_parallel(CUDA, names, Pressed())
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_importing_the_check_leaves_the_gpu_alone():
    """A process forked from one that has used the GPU could not use it."""
    program = (
        "import torch\n"
        "for name in ('is_available', 'device_count', '_lazy_init', 'get_device_capability', 'current_device'):\n"
        "    setattr(torch.cuda, name, None)\n"
        "import linvit.bench.gpu"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_case_finds_the_same_alone_as_among_all(monkeypatch):
    for shapes in ("SHAPES", "SHORT_SHAPES"):
        monkeypatch.setattr(gpu, shapes, ((20, 16),))
    monkeypatch.setattr(gpu, "KERNEL", partial(linear_attention, backend="torch"))
    monkeypatch.setattr(gpu, "SOFTMAX_KERNEL", gpu.plain_softmax)
    monkeypatch.setattr(gpu, "MAP", (1, 6, 5, 4))
    monkeypatch.setattr(gpu.depthwise, "kernel", gpu.depthwise.plain)
    monkeypatch.setattr(gpu.product, "kernel", lambda given: composed(**given))
    monkeypatch.setattr(gpu, "machine_obstacle", lambda *tensors, **options: None)
    before = torch.get_rng_state()
    together = {name: errors() for name, errors in gpu.cases(CPU).items()}
    attention = 4 * len(gpu.OPTIONS) - 1  # softmax attention has no kernel for float32
    assert len(together) == attention + 3 * (len(gpu.WORKS) + len(gpu.LAYERS))
    *_, last = (name for name in together if "bfloat16" in name)
    assert gpu.cases(CPU)[last]() == together[last]
    assert torch.equal(torch.get_rng_state(), before)
    others = [rows for name, rows in together.items() if "same bits" not in name]
    assert len({rows[0].error for rows in others}) == len(others)
