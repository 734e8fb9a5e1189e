"""Plans for models of transformers: the error and the times of each layer, and the patterns that follow."""

import json
import re

import pytest
import torch
from tiers import quick

import linvit
from linvit.errors import SettingError
from linvit.models import align
from linvit.models.hugging_face import attention_layers
from linvit.studies import plan_for_transformers
from linvit.studies.hugging_face import _hybrid
from linvit.studies.plan import Times

pytest.importorskip("transformers", reason="needs the extra hf")

from tiny_transformers import ARCHITECTURES

READING = {"ViT": "initializer_range", "BERT": "initializer_range", "Whisper": "init_std"}
"""One of images, one of texts with padding, one of sound; and what their initial weights are as large as."""


def aligned(name, pattern=None):
    """A teacher with three layers, and its student after a few steps."""
    layers = "encoder_layers" if name == "Whisper" else "num_hidden_layers"
    teacher = ARCHITECTURES[name].build("sdpa", **{READING[name]: 0.5, layers: 3})
    student = linvit.linearize(teacher, "linear", pattern)
    align(student, teacher, [ARCHITECTURES[name].inputs()] * 5)
    return student, teacher


@pytest.mark.parametrize("name", quick(READING, ["BERT"]))
def test_softmax_layers_of_a_hybrid_are_those_of_the_teacher(name):
    student, teacher = aligned(name)
    batch = ARCHITECTURES[name].inputs()
    hybrid = _hybrid(student, teacher)
    with torch.inference_mode():
        for pattern in ("SSS", "LSS", "SLS", "LLL"):
            mixed = linvit.linearize(teacher, "linear", pattern)
            for place, letter in enumerate(pattern):
                if letter == "L":
                    learned = attention_layers(student)[place].state_dict()
                    attention_layers(mixed)[place].load_state_dict(learned)
            with hybrid.having(pattern):
                assert torch.equal(student(**batch).last_hidden_state, mixed(**batch).last_hidden_state)
        assert torch.equal(student(**batch).last_hidden_state, mixed(**batch).last_hidden_state), "linear again"


def error_by_hand(name, student, teacher, place):
    """That of the teacher with one layer of the student."""
    mixed = linvit.linearize(teacher, "linear", "".join("L" if place == each else "S" for each in range(3)))
    attention_layers(mixed)[place].load_state_dict(attention_layers(student)[place].state_dict())
    with torch.no_grad():
        given, wanted = (ARCHITECTURES[name].read(model) for model in (mixed, teacher))
    if name == "BERT":
        given, wanted = (torch.cat((tokens[0], tokens[1, :3])) for tokens in (given, wanted))
    return ((given - wanted).norm() ** 2 / wanted.norm() ** 2).item()


@pytest.mark.usefixtures("long_softmax")
@pytest.mark.parametrize("name", quick(READING, ["BERT"]))
def test_a_plan_has_the_error_of_each_layer_alone_and_proposes_by_error_over_saved_time(name):
    student, teacher = aligned(name)
    batch, lines = ARCHITECTURES[name].inputs(), []
    plan = plan_for_transformers(student, teacher, [batch] * 2, batch, budget=36, progress=lines.append)
    assert len(plan.letters) == 3
    for letter in plan.letters:
        assert letter.error == pytest.approx(error_by_hand(name, student, teacher, letter.index), rel=1e-4)
    first, second, _ = plan.letters
    assert (first.saved_ms, second.saved_ms) == (5.0, 0.5)
    cheapest = "LSS" if first.error / 5.0 < second.error / 0.5 else "SLS"
    assert [proposal.pattern for proposal in plan.proposals] == ["SSS", cheapest, "LLS"]
    assert plan.proposals[0].error == pytest.approx(0, abs=1e-9)
    last = plan.proposals[-1]
    assert last.predicted_error == pytest.approx(first.error + second.error)
    assert (last.predicted_ms, last.ms) == (40 - 5.5, 30)
    assert plan.chosen == min(plan.proposals[1:], key=lambda proposal: proposal.error)
    size = " ".join(f"{key} {'×'.join(map(str, x.shape))}," for key, x in batch.items()).removesuffix(",")
    assert lines == ["Measuring the error of each block", f"Measuring times on {size}"]
    assert plan.about.startswith(f"Errors on 2 held-out batches; times on {size}, float32, median of 7\n")
    assert "of the last hidden state if only" in plan.about


@pytest.mark.slow
@pytest.mark.parametrize("name", READING)
def test_times_are_measured_for_the_linear_layers_of_the_student(name):
    student, teacher = aligned(name, "LLS")
    before = {key: tensor.clone() for key, tensor in student.state_dict().items()}
    batch = ARCHITECTURES[name].inputs()
    plan = plan_for_transformers(student, teacher, [batch], batch, rounds=3)
    assert [letter.index for letter in plan.letters] == [0, 1]
    assert all(letter.softmax_ms > 0 and letter.linear_ms > 0 for letter in plan.letters)
    assert {proposal.pattern[-1] for proposal in plan.proposals} == {"S"}
    assert plan.proposals[0].ms > max(letter.softmax_ms for letter in plan.letters)
    assert plan.chosen is None
    assert all(tensor.equal(before[key]) for key, tensor in student.state_dict().items())


def test_all_calls_of_a_shared_layer_count():
    """ALBERT has one layer for all its depths."""
    tiny = ARCHITECTURES["ALBERT"]
    teacher = tiny.build("sdpa", num_hidden_layers=3)
    hybrid = _hybrid(linvit.linearize(teacher, "linear"), teacher)
    counted = []

    class Counting(Times):
        def of(self, calls):
            with torch.inference_mode():
                counted.extend(len(call()) for call in calls.values())
            return dict.fromkeys(calls, 1.0)

    Counting(tiny.inputs(), "", "cpu", torch.float32, 1, 3).of_layers(hybrid)
    assert counted == [3, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("long_softmax")
def test_what_a_plan_cannot_be(tmp_path):
    student, teacher = aligned("ViT")
    batch = ARCHITECTURES["ViT"].inputs()

    def refused(sentence, batches=(batch,), example=batch, taught=student, **options):
        with pytest.raises(SettingError, match=re.escape(sentence)) as error:
            plan_for_transformers(taught, teacher, batches, example, **options)
        assert ". " not in str(error.value).replace("30.00", "")

    refused("`budget` is 10 ms, but the fastest pattern takes 30.00 ms: allow more time", budget=10, output=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["proposals"][-1]["ms"] == 30
    assert (tmp_path / "report.html").is_file()
    said = []
    with pytest.raises(OSError, match="cannot be written"):
        plan_for_transformers(student, teacher, [batch], batch, output=tmp_path / "plan.json", progress=said.append)
    assert not said
    refused("`budget` is 0, expected a number above 0", budget=0)
    refused("`batches` is empty, expected at least one", batches=())
    refused("`batches` has a Tensor, expected arguments of the models by name", batches=[batch["pixel_values"]])
    refused("`example` has a Tensor, expected arguments of the models by name", example=batch["pixel_values"])
    refused("the network has kept softmax attention in all layers", taught=linvit.linearize(teacher, "linear", "SSS"))
