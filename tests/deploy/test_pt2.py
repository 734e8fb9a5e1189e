"""Of a .pt2 file only operators of a list run: a hostile one ends in a sentence or does no more than predict."""

import io
import json
import random
import zipfile

import pytest
import timm
import torch
from hostile import bytes_changed, other
from tiers import quick

import linvit
from linvit.deploy import pt2
from linvit.deploy.formats import opened

HARMLESS = {"approximate", "equation", "indexing", "mode", "padding", "rounding_mode"}
"""The arguments of operators that are text."""


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    network = timm.create_model("ravlt_nano", depths=[1, 1, 1, 1], num_classes=10).eval()
    return linvit.export(network, tmp_path_factory.mktemp("plain") / "plain.pt2", size=32, dynamic=False).path


@pytest.fixture(scope="module")
def entries(plain):
    with zipfile.ZipFile(plain) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def write(entries, tmp_path, monkeypatch):
    """Writes a file with some entries changed, and others before them; code in it would leave the file RAN."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "payload.py").write_text("open('RAN', 'w').close()\nX = {'a': 1}")

    def written(changed, before=(), compression=zipfile.ZIP_STORED):
        with zipfile.ZipFile("evil.pt2", "w", compression) as archive:
            for name, content in (*before, *(entries | changed).items()):
                archive.writestr(zipfile.ZipInfo(name), content, compression)
        return tmp_path / "evil.pt2"

    return written


def graph_of(entries):
    return json.loads(entries["plain/models/model.json"])


def packed(graph):
    return {"plain/models/model.json": json.dumps(graph).encode()}


def pickled():
    class Evil:
        def __reduce__(self):
            return exec, ("open('RAN', 'w').close()",)

    buffer = io.BytesIO()
    torch.save((Evil(),), buffer)
    return buffer.getvalue()


def specs(graph):
    evil = json.dumps({"__enum__": True, "fqn": "payload:X", "name": "a"})
    spec = json.dumps([1, {"type": "builtins.tuple", "context": evil, "children_spec": []}])
    for call in graph["graph_module"]["module_call_graph"]:
        if call["signature"]:
            call["signature"] |= {"in_spec": spec, "out_spec": spec}


def guards(graph):
    graph["guards_code"] = ["open('RAN', 'w').close()"]


def metadata(graph):
    for node in graph["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {"source_fn_stack": "x,torch.os.system", "torch_fn": "open('RAN', 'w').close()"}


def sizes(graph):
    for meta in graph["graph_module"]["graph"]["tensor_values"].values():
        meta["sizes"] = [{"as_expr": {"expr_str": "__import__('payload').X", "hint": None}}]


def verifiers(graph):
    graph["verifiers"] = ["payload.X"]


@pytest.mark.parametrize("change", [specs, guards, metadata, sizes, verifiers])
def test_what_torch_would_evaluate_is_not_read(write, entries, images, plain, tmp_path, change):
    graph = graph_of(entries)
    change(graph)
    assert graph != graph_of(entries)
    _, session = opened(write(packed(graph)))
    assert torch.equal(session(images)[0], opened(plain)[1](images)[0])
    assert not (tmp_path / "RAN").exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("before", [True, False], ids=["two entries of one name", "instead"])
def test_a_pickle_is_not_read(write, entries, images, plain, tmp_path, before):
    name = "plain/data/sample_inputs/model.pt"
    assert name in entries
    path = write({}, [(name, pickled())]) if before else write({name: pickled()})
    _, session = opened(path)
    assert torch.equal(session(images)[0], opened(plain)[1](images)[0])
    config = "plain/data/weights/model_weights_config.json"
    with pytest.raises(ValueError, match="cannot read"):
        opened(write({config: entries[config].replace(b"weight_3", b"../sample_inputs/model.pt"), name: pickled()}))
    assert not (tmp_path / "RAN").exists()


def argument(name, kind, value):
    return {"name": name, "arg": {kind: value}, "kind": 1}


MAPPED = [
    argument("filename", "as_string", "victim"),
    argument("shared", "as_bool", True),
    argument("size", "as_int", 25),
]


@pytest.mark.parametrize(
    ("target", "inputs"),
    [
        ("torch.ops.aten.from_file.default", MAPPED),
        ("torch.ops.aten._print.default", [argument("s", "as_string", "x")]),
        ("torch.ops.aten.resize_.default", None),
        ("torch.ops.aten.as_strided.default", None),
        ("torch.ops.aten.add.__class__", None),
        ("torch.ops.profiler._record_function_enter.default", None),
        ("torch.os.system", [argument("command", "as_string", "touch RAN")]),
        ("torch.load", None),
        ("_operator.methodcaller", [argument("a", "as_string", "x")]),
        ("math.factorial", [argument("a", "as_int", 10**9)]),
        ("#triton:kernel", None),
        ("", None),
    ],
)
def test_other_operators_are_refused(write, entries, tmp_path, target, inputs):
    victim = tmp_path / "victim"
    victim.write_text("precious data of the user\n")
    graph = graph_of(entries)
    node = graph["graph_module"]["graph"]["nodes"][2]
    node["target"] = target
    node["inputs"] = inputs or node["inputs"]
    with pytest.raises(ValueError, match=r"cannot read .*evil\.pt2 \(it contains .*, which linvit does not write"):
        opened(write(packed(graph)))
    assert victim.read_text() == "precious data of the user\n"
    assert not (tmp_path / "RAN").exists()


def test_names_of_arguments_are_no_code(write, entries, images, tmp_path):
    graph = graph_of(entries)
    node = next(x for x in graph["graph_module"]["graph"]["nodes"] if x["target"].endswith("gelu.default"))
    node["inputs"].append({"name": "x=open('RAN','w'),approximate", "arg": {"as_string": "none"}, "kind": 2})
    _, session = opened(write(packed(graph)))
    with pytest.raises(ValueError, match="Unknown keyword argument"):
        session(images)
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"storage_offset": {"as_int": 10**6}}, "out of bounds"),
        ({"storage_offset": {"as_int": -1}}, "invalid storage offset"),
        ({"strides": [{"as_int": -1}] * 4}, "Negative strides"),
        ({"sizes": [{"as_expr": {"expr_str": "__import__('payload').X", "hint": None}}] * 4}, "as_int"),
    ],
)
def test_a_weight_stays_within_its_bytes(write, entries, config, match):
    name = "plain/data/weights/model_weights_config.json"
    changed = json.loads(entries[name])
    about = next(about for about in changed["config"].values() if len(about["tensor_meta"]["sizes"]) == 4)
    about["tensor_meta"] |= config
    with pytest.raises(ValueError, match=match):
        opened(write({name: json.dumps(changed).encode()}))


def test_bombs_and_machine_code_are_refused(write):
    with pytest.raises(ValueError, match="compressed"):
        opened(write({"plain/data/constants/x": bytes(2**20)}, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match="contains machine code, which linvit never runs"):
        opened(write({"plain/data/aotinductor/model/x.so": b"x"}))


def test_no_operator_of_the_list_takes_a_file_or_writes_outside_of_tensors():
    for target in pt2.OPERATORS:
        if not target.startswith("torch.ops"):
            continue  # of numbers
        family, _, overload = target.removeprefix("torch.ops.aten.").partition(".")
        schema = getattr(getattr(torch.ops.aten, family), overload)._schema
        assert {x.name for x in schema.arguments if "str" in str(x.type)} <= HARMLESS, target
        assert not schema.is_mutable or family.endswith("_") or "batch_norm" in family or family == "instance_norm", (
            target
        )
        assert not any(word in family for word in ("file", "empty", "strided", "storage", "set", "resize", "rand"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ravlt_nano", {"pattern": "LLSS", "depths": [1, 1, 1, 1]}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("care_nano", "test_vit", "test_efficientnet")),
    ],
)
def test_a_program_computes_what_torch_does(tmp_path, name, options):
    torch.manual_seed(0)
    path = linvit.export(timm.create_model(name, **options).eval(), tmp_path / "x.pt2", size=64, dynamic=False).path
    x = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(opened(path)[1](x)[0], torch.export.load(path).module()(x)[0])


@pytest.mark.parametrize("seed", quick(range(300), range(30)))
def test_damaged_files_end_in_one_sentence(write, entries, plain, tmp_path, seed):
    rng = random.Random(seed)
    kind = rng.choice(["bytes", "cut", "graph", "graph", "graph", "weights", "facts"])
    if kind in ("bytes", "cut"):
        content, path = plain.read_bytes(), tmp_path / "evil.pt2"
        changed = bytes_changed(content, rng, rng.choice([1, 10, 1000]))
        path.write_bytes(changed if kind == "bytes" else content[: rng.randrange(len(content))])
    else:
        names = {
            "graph": "models/model.json",
            "weights": "data/weights/model_weights_config.json",
            "facts": "extra/linvit",
        }
        content = json.loads(entries[f"plain/{names[kind]}"])
        for _ in range(rng.choice([1, 5])):
            content = other(content, rng)
        path = write({f"plain/{names[kind]}": json.dumps(content).encode()})
    refusal = None
    try:
        opened(path)
    except ValueError as error:
        refusal = str(error)
    assert refusal is None or ("evil.pt2" in refusal and len(refusal) < 400)
