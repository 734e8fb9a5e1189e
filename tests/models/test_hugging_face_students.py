"""Linear models of transformers learn from the softmax models that they were made from."""

import copy
import re

import pytest
import timm
import torch
from torch.utils.data import DataLoader, IterableDataset

import linvit
from linvit.errors import SettingError
from linvit.models import align, attention_errors, transfer
from linvit.models.hugging_face import attention_layers
from linvit.models.hugging_face_students import relative_error

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from tiny_transformers import ARCHITECTURES, TEXTS  # noqa: E402

READING = ("ViT", "BERT", "Whisper")
"""One of images, one of texts with padding, one of sound."""


def built(name, **options):
    return ARCHITECTURES[name].build("sdpa", **options)


def pair(name, pattern=None, **options):
    """A teacher whose attention is far from uniform, and its student."""
    teacher = built(name, **{"initializer_range" if name != "Whisper" else "init_std": 0.5}, **options)
    return linvit.linearize(teacher, "linear", pattern), teacher


@pytest.mark.parametrize("name", ["DINOv2", "BERT", "DistilBERT"])
def test_every_linear_layer_learns_from_what_its_teacher_reads(name):
    tiny = ARCHITECTURES[name]
    teacher = tiny.build("sdpa").double()
    student = linvit.linearize(teacher, "rala", "LS")
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in tiny.inputs().items()}
    errors = attention_errors(student, teacher, **inputs)
    assert errors.shape == (1,)
    first = errors.item()
    layer, other = attention_layers(student)
    read = {}
    for learned in (attention_layers(teacher)[0], layer):
        learned.register_forward_hook(lambda module, args, output: read.__setitem__(module, output[0]))
    tiny.read(teacher, **inputs)
    tiny.read(student, **inputs)  # its first layer reads what the teacher's does
    given, wanted = read[layer], read[attention_layers(teacher)[0]]
    if "attention_mask" in inputs:
        given, wanted = (x[inputs["attention_mask"].bool()] for x in (given, wanted))
    assert first == pytest.approx(((given - wanted).norm() / wanted.norm()).item() ** 2, rel=1e-9)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)
    for _ in range(40):
        optimizer.zero_grad()
        attention_errors(student, teacher, **inputs).mean().backward()
        optimizer.step()
    assert attention_errors(student, teacher, **inputs).item() < 0.5 * first
    assert all(p.grad is None for p in (*other.parameters(), *teacher.parameters()))


def test_all_tokens_count_where_attention_returns_a_tensor_alone():
    teacher = built("Qwen2-VL")
    student = linvit.linearize(teacher, "linear", "LS")
    inputs, read = ARCHITECTURES["Qwen2-VL"].inputs(), {}
    for model in (teacher, student):  # its first layer reads what the teacher's does
        layer = attention_layers(model)[0]
        layer.register_forward_hook(lambda module, args, output, model=model: read.__setitem__(model, output))
        ARCHITECTURES["Qwen2-VL"].read(model, **inputs)
    given, wanted = read[student], read[teacher]
    error = attention_errors(student, teacher, **inputs).item()
    assert error == pytest.approx(((given - wanted).norm() / wanted.norm()).item() ** 2, rel=1e-5)


def test_errors_of_large_activations_in_float16_are_finite():
    wanted = torch.full((4, 300), 300.0).half()  # its square is larger than float16 has
    assert relative_error(1.5 * wanted, wanted).item() == 0.25
    assert relative_error(0 * wanted, 0 * wanted).item() == 0


@pytest.mark.parametrize("half", [False, True])
def test_aligning_trains_the_linear_layers_and_nothing_else(half):
    teacher = built("BERT", initializer_range=0.5)  # its attention is far from uniform
    student = linvit.linearize(teacher, "linear", "LS")
    before = {name: p.clone() for name, p in student.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16, enabled=half):  # its copies of the weights must follow them
        errors = align(student, teacher, [TEXTS["BERT"].inputs()] * 30, rate=1e-2)
    assert len(errors) == 30
    assert errors[-1] < 0.5 * errors[0]
    changed = {name for name, p in student.named_parameters() if not p.equal(before[name])}
    layer = "encoder.layer.0.attention.self."
    assert changed <= {name for name in before if name.startswith(layer)}
    assert layer + "query.weight" in changed


@pytest.mark.parametrize("name", READING)
def test_transferring_trains_the_whole_student_on_the_last_hidden_state(name):
    student, teacher = pair(name, "LS")
    batches = [ARCHITECTURES[name].inputs()] * 30
    before = {key: p.detach().clone().requires_grad_(p.requires_grad) for key, p in student.named_parameters()}
    taught = copy.deepcopy(teacher.state_dict())
    errors = transfer(student, teacher, batches, rate=3e-3)
    assert len(errors) == 30
    assert errors[-1] < 0.5 * errors[0]
    read = {key for key, p in before.items() if p.requires_grad and "pooler" not in key}
    assert {key for key, p in student.named_parameters() if not p.equal(before[key])} == read
    assert all(tensor.equal(taught[key]) for key, tensor in teacher.state_dict().items())


COUNTED = {"BERT": 3, "SigLIP 2": 12}
"""Tokens of the second input that are no padding."""


@pytest.mark.parametrize("name", [*READING, "SigLIP 2"])
def test_the_error_of_a_transfer_by_hand(name):
    student, teacher = pair(name)
    batch = ARCHITECTURES[name].inputs()
    with torch.no_grad():
        given, wanted = (model(**batch).last_hidden_state for model in (student, teacher))
    if name in COUNTED:
        given, wanted = (torch.cat((tokens[0], tokens[1, : COUNTED[name]])) for tokens in (given, wanted))
    expected = (given - wanted).norm() ** 2 / wanted.norm() ** 2
    assert transfer(student, teacher, [batch])[0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("learn", [align, transfer])
def test_a_teacher_does_not_drop_out(learn):
    student, teacher = pair("BERT")
    teacher.embeddings.dropout.p = 0.5
    batch = TEXTS["BERT"].inputs()
    expected = learn(copy.deepcopy(student), teacher, [batch])
    assert learn(student, teacher.train(), [batch]) == expected


def with_a_head():
    headed = transformers.BertForSequenceClassification(built("BERT").config)
    return linvit.linearize(headed, "linear"), headed


def the_same_model():
    return (linvit.swap_attention(built("BERT"), "linear"),) * 2


class Endless(IterableDataset):
    def __iter__(self):
        raise NotImplementedError


BATCHES = [TEXTS["BERT"].inputs()]
MISTAKES = {
    "another class": (
        lambda: (built("ViT"), built("BERT")),
        BATCHES,
        "`student` is a ViTModel with 2 attention layers and `teacher` a BertModel with 2 attention layers, expected",
    ),
    "another depth": (
        lambda: (built("BERT", num_hidden_layers=3), built("BERT")),
        BATCHES,
        "`student` is a BertModel with 3 attention layers and `teacher` a BertModel with 2 attention layers, expected",
    ),
    "another width": (
        lambda: (pair("BERT", hidden_size=48)[0], built("BERT")),
        BATCHES,
        "`student` and `teacher` have attention of different widths, expected the same",
    ),
    "frozen": (
        lambda: (pair("BERT")[0].requires_grad_(False), built("BERT")),
        BATCHES,
        "`student` is frozen, expected weights that can be learned: call student.requires_grad_()",
    ),
    "float16": (lambda: [model.half() for model in pair("BERT")], BATCHES, "`student` has weights in float16"),
    "no linear layer": (lambda: pair("BERT", "SS"), BATCHES, "the network has kept softmax attention in all layers"),
    "a linear teacher": (the_same_model, BATCHES, "`teacher` has linear attention, expected softmax attention alone"),
    "no batches": (lambda: pair("BERT"), [], "`batches` is empty, expected at least one"),
    "a generator": (
        lambda: pair("BERT"),
        iter(BATCHES),
        "`batches` is a list_iterator, expected a list or a DataLoader",
    ),
    "a DataLoader without length": (
        lambda: pair("BERT"),
        DataLoader(Endless()),
        "`batches` is a DataLoader, expected a list or a DataLoader of known length",
    ),
    "a network of timm": (
        lambda: (timm.create_model("vit_tiny_patch16_224", depth=1), built("BERT")),
        BATCHES,
        "`student` is a VisionTransformer, expected a model of transformers",
    ),
}


def eager():
    teacher = built("BERT")
    teacher.set_attn_implementation("eager")
    return linvit.linearize(teacher, "linear"), teacher


def refused(learn, student, teacher, batches, sentence):
    with pytest.raises(SettingError, match=re.escape(sentence)) as error:
        learn(student, teacher, batches)
    assert ". " not in str(error.value)


@pytest.mark.parametrize("case", MISTAKES)
def test_what_cannot_be_learned_is_one_sentence(case):
    models, batches, sentence = MISTAKES[case]
    for learn in (align, transfer):
        refused(learn, *models(), batches, sentence)


@pytest.mark.parametrize("rate", [0, -1e-3, float("nan"), "1e-3"])
def test_a_rate_is_a_positive_number(rate):
    with pytest.raises(SettingError, match=r"`rate` is .*, expected a number above 0"):
        transfer(*pair("BERT"), BATCHES, rate=rate)


def test_masks_of_eager_attention_have_their_own_sentence():
    refused(align, *eager(), BATCHES, "call teacher.set_attn_implementation('sdpa')")


def test_a_transfer_needs_the_last_hidden_state():
    sentence = "the output of BertForSequenceClassification has no last_hidden_state: give the models without heads"
    refused(transfer, *with_a_head(), BATCHES, sentence)
    student, teacher = (model.base_model for model in with_a_head())
    assert transfer(student, teacher, BATCHES)[0] > 0


def test_what_is_no_network_is_refused():
    with pytest.raises(TypeError, match=re.escape("`teacher` is None, expected an nn.Module")):
        align(pair("BERT")[0], None, [TEXTS["BERT"].inputs()])
