"""Files that others wrote, in every format, damaged in the ways of one table."""

import html
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import onnx
import timm
import torch
from dense_formats import (
    write_id_maps,
    write_image,
    write_label_maps,
    write_masks,
    write_panoptic,
    write_voc,
    write_yolo,
)
from fuzz_files import BAD_FILES
from fuzz_play import Case, call, command
from fuzz_run import HOME, tiny_folder
from hostile import ODD, bytes_changed, coco_content, other
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from safetensors.torch import save_file
from tiny_language import write_texts
from tiny_speech import write_an4, write_speech
from torch import nn

from linvit.deploy.facts import Facts, SequenceFacts
from linvit.deploy.formats import FORMATS
from linvit.deploy.runtimes import openvino_core
from linvit.streaming import run_in_strips

WORDS = [*(x if isinstance(x, str) else json.dumps(x) for x in ODD), "9" * 5000, "1e400", "\u202e", "&x;", "<x/>", "*x"]
WORDS += ["../../../../etc/passwd", "!!python/object/apply:evil.f [x]", "\udcff", "\u2028", "inf", "0x10", "1_0", "٣"]
PICKLE = b"cevil\nX\n(tR."  # imports evil
REFUSED = {"fifo", "device", "folder", "link to itself", "bomb"}
"""The damages after which no file can be read."""


def word_changed(content: bytes, random: Random) -> bytes:
    place = random.choice([*re.finditer(rb"[\w.+-]+|\S", content)] or [re.match(b"", content)])
    return content[: place.start()] + os.fsencode(random.choice(WORDS)) + content[place.end() :]


def line_moved(content: bytes, random: Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    lines.insert(random.randrange(len(lines)), random.choice(lines))
    return b"".join(random.choice([lines, lines[1:], lines[::-1]]))


def json_changed(content: bytes, random: Random) -> bytes:
    """The content with other JSON: of a file, or of the header of a file in safetensors' format."""
    if content[:1] in (b"{", b"["):
        return json.dumps(other(json.loads(content), random)).encode()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(other(json.loads(content[8 : 8 + length]), random)).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def zip_changed(content: bytes, random: Random) -> bytes:
    """An archive with an entry that is doubled, a pickle with code, elsewhere, much larger or of a wrong size."""
    if not content.startswith(b"PK"):  # a pickle alone
        return PICKLE + content
    archive, written = zipfile.ZipFile(io.BytesIO(content)), io.BytesIO()
    entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    number = random.randrange(len(entries))
    name, value = entries[number]
    if random.random() < 0.5:
        number, (name, value) = next((n, e) for n, e in enumerate(entries) if e[0].endswith((".pkl", ".npy")))
    new = random.choice([(name, value), (name, PICKLE), (f"../../{name}", value), (name, bytes(10**8)), (name, b"")])
    entries[number : number + random.choice([0, 1])] = [new]
    with zipfile.ZipFile(written, "w", random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as changed:
        for name, value in entries:
            changed.writestr(zipfile.ZipInfo(name), value, compresslevel=1)
    return written.getvalue()


def xml_changed(content: bytes, random: Random) -> bytes:
    """A document with entities that grow or name files, an element that is nested deeply, doubled or missing."""
    entity = random.choice(['SYSTEM "/dev/zero"', 'SYSTEM "file:///etc/passwd"', 'PUBLIC "x" "http://127.0.0.1:9/x"'])
    bomb = "".join(f'<!ENTITY x{n} "{f"&x{n - 1};" * 10}">' for n in range(1, 12)) + '<!ENTITY x "&x11;">'
    body = re.sub(rb"^<\?xml.*?\?>", b"", content)
    element = random.choice(
        re.findall(rb"<\w[^>]*/>|<(?:object|layer|edge|bndbox)\b.*?</\w+>", body, re.DOTALL) or [b"<"]
    )
    odd = re.sub(rb">[\w.]+<|\"[\w.]+\"", lambda found: found[0][:1] + b"&x;" + found[0][-1:], body, count=9)
    return random.choice(
        [
            f"<!DOCTYPE x [<!ENTITY x {entity}>]>".encode() + odd,
            f'<!DOCTYPE x [<!ENTITY x0 "xxxxxxxxxx">{bomb}]>'.encode() + odd,
            body.replace(element, element * random.choice([0, 2, 100]), 1),
            body.replace(element, b"<a>" * 30_000 + b"</a>" * 30_000, 1),
            body.replace(element, b"<a x='" + b"x" * 10**6 + b"'/>", 1),
        ]
    )


def yaml_changed(content: bytes, random: Random) -> bytes:
    bomb = "x0: &x0 [x,x]\n" + "".join(f"x{n}: &x{n} [{f'*x{n - 1},' * 9}]\n" for n in range(1, 12)) + "names: *x11\n"
    odd = ["&x [*x]", "[" * 5000, "!!python/object/apply:evil.f []", "{1: a, 1: b}", "{<<: {0: a}}", "!evil.X {0: a}"]
    odd += ["2026-99-99", "{0: a, 10000000: b}"]
    return random.choice([bomb, "- names", *(f"names: {value}" for value in odd)]).encode()


CHANGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "cut": lambda content, random: content[: random.randrange(len(content) or 1)],
    "noise": lambda content, random: random.randbytes(random.choice([1, 40, 400, 4000])),
    "a byte changed": partial(bytes_changed, number=1),
    "bytes changed": partial(bytes_changed, number=30),
    "first bytes changed": partial(bytes_changed, number=4, within=64),
    "longer": lambda content, random: content + random.randbytes(99),
    "twice": lambda content, random: content * 2,
    "utf-16": lambda content, random: content.decode("latin-1").encode("utf-16"),
    "another word": word_changed,
    "a line moved": line_moved,
    "other JSON": json_changed,
    "another archive": zip_changed,
    "other XML": xml_changed,
    "other YAML": yaml_changed,
}
SPECIAL = {
    "other JSON": (".json", ".safetensors"),
    "another archive": (".pth", ".ckpt", ".npz", ".pt"),
    "other XML": (".xml",),
    "other YAML": (".yaml",),
}
"""The endings of the files of which there are such damages."""


class Reader(NamedTuple):
    """What reads files of others.

    make: writes good files to a folder. files: patterns of those that are damaged. use: reads them in the folder and
    returns the exit code. facts: what a file says about itself. refuses: the damages that must end in a sentence.
    may_abort: whether the library ends the process for some files, as the page on safety says.
    """

    make: Callable[[Path], Any]
    files: str
    use: Callable[[], int]
    facts: str = ""
    refuses: Collection[str] = REFUSED
    may_abort: bool = False


@cache
def good(kind: str, name: str) -> Path:
    folder = Path(HOME.name, kind, name)
    folder.mkdir(parents=True)
    READERS[kind][name].make(folder)
    return folder


@st.composite
def damaged(draw: st.DrawFn, kind: str) -> Case:
    """A reader of this kind, one of its files, a damage and a seed; apart, because libraries may abort the process."""
    name = draw(st.sampled_from(sorted(READERS[kind])))
    folder, reader = good(kind, name), READERS[kind][name]
    pattern = draw(st.sampled_from(reader.files.split()))
    file = draw(st.sampled_from(sorted(path.relative_to(folder) for path in folder.glob(pattern))))
    fitting = [way for way in CHANGES if way not in SPECIAL] + [w for w in SPECIAL if file.suffix in SPECIAL[w]] * 4
    fitting += ["other graph"] * 8 * (file.suffix == ".onnx") + ["other facts"] * 8 * any(
        reader.facts and form(reader.facts).encode() in (folder / file).read_bytes() for form in (str, html.escape)
    )
    way, seed = draw(st.sampled_from([*fitting, *BAD_FILES])), draw(st.integers(0, 10**6))
    case = f"{kind}, {name}: {file} with {way} ({seed})"
    wrong = way in reader.refuses
    if way == "other facts":
        before = json.loads(reader.facts)
        wrong = not alike(before, other(before, Random(seed)))
    return Case(case, partial(use_damaged, kind, name, file, way, seed), wrong, apart=True, may_abort=reader.may_abort)


def alike(first: Any, second: Any) -> bool:
    """Whether two JSON values have the same types and sizes."""
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(alike(first[x], second[x]) for x in first)
        )
    if isinstance(first, list):
        return isinstance(second, list) and len(first) == len(second) and all(map(alike, first, second))
    return first == second or (isinstance(second, type(first)) and isinstance(first, bool) == isinstance(second, bool))


def use_damaged(kind: str, name: str, file: Path, way: str, seed: int, work: Path) -> int:
    reader, random = READERS[kind][name], Random(seed)
    shutil.copytree(good(kind, name), work, dirs_exist_ok=True, symlinks=True)
    content = file.read_bytes()
    file.unlink()
    if way in BAD_FILES:
        BAD_FILES[way](file)
    elif way == "other graph":
        file.write_bytes(graph_changed(content, random))
    elif way == "other facts":
        facts = json.dumps(other(json.loads(reader.facts), random)).ljust(len(reader.facts))
        for form in (str, html.escape):
            content = content.replace(form(reader.facts).encode(), form(facts).encode())
        file.write_bytes(content)
    else:
        file.write_bytes(CHANGES[way](content, random))
    return reader.use()


# Exported files: of a network of one product.

COMMON = {"name": "ravlt_nano", "class_names": tuple("abcd"), "weights": "0" * 64}
IMAGES = Facts(task="classification", size=(32, 32), smallest=0, mean=(0.5,) * 3, std=(0.5,) * 3,
               interpolation="bicubic", crop_pct=1.0, **COMMON).to_json().ljust(5000)  # fmt: skip


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.float().mean((2, 3)))


def predict_exported(file: str) -> int:
    Image.new("RGB", (32, 32)).save("image.png")
    return command("predict", file, "image.png")


def write_onnx(folder: Path, facts: str = IMAGES) -> None:
    images = helper.make_tensor_value_info("images", TensorProto.UINT8, [1, 3, 32, 32])
    outputs = helper.make_tensor_value_info("outputs", TensorProto.FLOAT, [1, 4])
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["mean", "weight"], ["outputs"]),
    ]
    save_onnx(folder, nodes, [images], [outputs], (3, 4), facts)


def save_onnx(folder: Path, nodes: Any, inputs: Any, outputs: Any, weight: tuple[int, int], facts: str) -> None:
    ones = numpy_helper.from_array(np.ones(weight, np.float32), "weight")
    graph = helper.make_graph(nodes, "graph", inputs, outputs, [ones])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {"linvit": facts})
    onnx.save(model, str(folder / "x.onnx"))


def write_openvino(folder: Path) -> None:
    import openvino

    write_onnx(folder)
    model = openvino_core().read_model(folder / "x.onnx")
    model.set_rt_info(IMAGES, "linvit")
    openvino.save_model(model, folder / "x.xml", compress_to_fp16=False)
    (folder / "x.onnx").unlink()


def write_format(suffix: str, folder: Path) -> None:
    images = torch.zeros(1, 3, 32, 32, dtype=FORMATS[suffix].pixels)
    program = torch.export.export(Product(), (images,))
    FORMATS[suffix].write(program, IMAGES, folder / f"x{suffix}", ("images",), ("outputs",))


SEQUENCES = {
    "language": ("tokens", [1, 1], {"tokenizer": "bytes", "separator": None, "context": 16, "corpus": "x"}),
    "speech": ("features", [1, None, 2], {"rate": 16000, "mels": 2, "mean": [0.0] * 2, "std": [1.0] * 2,
                                          "tokenizer": "", "corpus": "x"}),
}  # fmt: skip
NAMES = {"language": [], "speech": ["<blank>", "a", "b"]}
STATES = {"layer0.key": [1, 1, 0, 2], "layer0.value": [1, 1, 0, 2]}


def sequence_facts(task: str) -> str:
    about = COMMON | {"class_names": NAMES[task], "mechanism": "mala", "logits": len(NAMES[task]) or 257}
    states = STATES if task == "language" else {}
    facts = SequenceFacts(task=task, dynamic=task == "speech", states=states, preprocessing=SEQUENCES[task][2], **about)
    return facts.to_json().ljust(5000)


def write_sequence_onnx(task: str, folder: Path) -> None:
    """A table of logits by tokens, with states that stay as they are; or a product of features."""
    name, shape, _ = SEQUENCES[task]
    width, is_text = len(NAMES[task]) or 257, task == "language"
    number = TensorProto.INT64 if is_text else TensorProto.FLOAT
    states = {state: [1, 1, None, 2] for state in (STATES if is_text else {})}
    inputs = [helper.make_tensor_value_info(name, number, shape)]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)]
    kind, read = ("Gather", ["weight", name]) if is_text else ("MatMul", [name, "weight"])
    nodes = [helper.make_node(kind, read, ["logits"])]
    for state, sizes in states.items():
        inputs.append(helper.make_tensor_value_info(state, TensorProto.FLOAT, sizes))
        outputs.append(helper.make_tensor_value_info(f"next.{state}", TensorProto.FLOAT, sizes))
        nodes.append(helper.make_node("Identity", [state], [f"next.{state}"]))
    save_onnx(folder, nodes, inputs, outputs, (257 if is_text else 2, width), sequence_facts(task))


def transcribe() -> int:
    import soundfile

    soundfile.write("a.wav", np.zeros(16000), 16000)
    return command("predict", "x.onnx", "a.wav")


def elsewhere(model: onnx.ModelProto, random: Random) -> None:
    """The weights in another file: outside of the folder, a pipe, a device, or with an odd place in it."""
    os.mkfifo("pipe")
    Path("beside").write_bytes(bytes(100))
    os.symlink("/etc/passwd", "link")
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    places = ["../modules/evil.py", "/etc/passwd", "/dev/zero", "pipe", "link", ".", "", "nothing", "beside", "x.onnx"]
    for key, value in (
        ("location", random.choice(places)),
        ("offset", random.choice(["0", "-1", "9" * 30, "x", "4"])),
        ("length", random.choice(["12", "-1", "9" * 30, ""])),
    ):
        weight.external_data.add(key=key, value=value)


def reshaped(model: onnx.ModelProto, random: Random) -> None:
    weight = model.graph.initializer[0]
    weight.dims[:] = random.choice([[3, 2**40], [2**62, 2**62], [-1, 4], [], [0], [3, 4] * 20, [4, 3]])
    weight.data_type = random.choice([weight.data_type, 0, 8, 99])


def inserted(model: onnx.ModelProto, random: Random) -> None:
    """A node before the others whose output they read: unknown, of huge size, of another type, or NaN."""
    graph = model.graph
    last = graph.node[-1].output[0]
    for node in graph.node:
        node.output[:] = ["before" if name == last else name for name in node.output]
    size = numpy_helper.from_array(np.array(random.choice([[1 << 36], [1 << 62] * 3, [-5], [0], [7, 1, 4]])), "size")
    graph.initializer.append(size)
    nan = numpy_helper.from_array(np.array([random.choice([np.nan, np.inf])], np.float32), "nan")
    graph.initializer.append(nan)
    nodes = [
        helper.make_node(random.choice(["Expand", "Reshape", "Tile"]), ["before", "size"], [last]),
        helper.make_node(
            random.choice(["Nothing", "PyOp"]), ["before"], [last], domain=random.choice(["", "x", "ai.onnx.ml"])
        ),
        helper.make_node("ArgMax", ["before"], [last]),
        helper.make_node("ReduceMean", ["before"], [last], keepdims=0),
        helper.make_node("Mul", ["before", "nan"], [last]),
        helper.make_node("Identity", [last], [last]),
        helper.make_node("Mul", ["before", "missing"], [last]),
    ]
    graph.node.insert(random.choice([0, len(graph.node)]), random.choice(nodes))


def nested(model: onnx.ModelProto, random: Random) -> None:
    """Branches in branches, a loop, or functions that call themselves or have the name of an operator."""
    graph, last = model.graph, model.graph.node[-1].output[0]
    kind = random.choice(["branches", "loop", "function"])
    value = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    if kind == "branches":
        yes = numpy_helper.from_array(np.array(True), "yes")
        graph.initializer.append(yes)
        body = helper.make_graph([helper.make_node("Identity", [graph.input[0].name], ["inner"])], "b", [], [value])
        for depth in range(random.choice([1, 20, 60])):
            branches = {"then_branch": body} | ({"else_branch": body} if depth < 4 else {})
            body = helper.make_graph([helper.make_node("If", ["yes"], ["inner"], **branches)], "b", [], [value])
        graph.node.insert(0, helper.make_node("If", ["yes"], ["unused"], then_branch=body, else_branch=body))
    elif kind == "loop":
        turns = numpy_helper.from_array(np.array(random.choice([3, -1, 1000])), "turns")
        graph.initializer.append(turns)
        scalar = [helper.make_tensor_value_info(name, TensorProto.INT64, []) for name in ("turn", "go")]
        scalar[1].type.tensor_type.elem_type = TensorProto.BOOL
        end = helper.make_tensor_value_info("went", TensorProto.BOOL, [])
        body = helper.make_graph([helper.make_node("Identity", ["go"], ["went"])], "b", scalar, [end])
        graph.node.insert(0, helper.make_node("Loop", ["turns", ""], [], body=body))
    else:
        inside = helper.make_node("F", ["a"], ["b"], domain=random.choice(["f", ""]))
        function = helper.make_function(random.choice(["f", ""]), random.choice(["F", "Cast"]), ["a"], ["b"], [inside],
                                        [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)])  # fmt: skip
        model.functions.append(function)
        model.opset_import.append(helper.make_opsetid("f", 1))
        for node in graph.node:
            node.output[:] = ["before" if name == last else name for name in node.output]
        graph.node.append(helper.make_node("F", ["before"], [last], domain="f"))


def relabelled(model: onnx.ModelProto, random: Random) -> None:
    """Doubled facts and weights, other versions, and inputs and outputs of other names, types, sizes and numbers."""
    change = random.choice(["facts", "no facts", "weight", "version", "opset", "input", "output", "one more", "fewer"])
    value = random.choice([model.graph.input[0], model.graph.output[0]])
    if change == "facts":
        model.metadata_props.add(key="linvit", value=random.choice(["{}", "", "[]", "{" * 10_000, "null"]))
    elif change == "no facts":
        del model.metadata_props[:]
    elif change == "weight":
        model.graph.initializer.append(model.graph.initializer[0])
    elif change == "version":
        model.ir_version = random.choice([-1, 0, 1, 10**6])
    elif change == "opset":
        model.opset_import[0].version = random.choice([-1, 0, 1, 10**6])
    elif change in ("input", "output"):
        value.name = random.choice(["", "x", "weight"])
    elif change == "one more":
        (model.graph.input if random.random() < 0.5 else model.graph.output).append(value)
    else:
        del (model.graph.input if random.random() < 0.5 else model.graph.output)[:]
    if random.random() < 0.3:
        value.type.tensor_type.elem_type = random.choice([0, 1, 8, 11, 99])
        value.type.tensor_type.shape.dim.add(dim_value=random.choice([-1, 2**62, 5]))


def graph_changed(content: bytes, random: Random) -> bytes:
    model = onnx.load_from_string(content)
    random.choice([elsewhere, reshaped, inserted, nested, relabelled])(model, random)
    return model.SerializeToString()


# Weights, data, spill folders and compiled libraries.


def write_hub_folder(folder: Path) -> None:
    network = timm.create_model("ravlt_nano", num_classes=3)
    timm.models.save_for_hf(network, folder, model_config={"label_names": ["a", "b", "c"]}, safe_serialization=True)


def write_weights(folder: Path) -> None:
    weights = timm.create_model("ravlt_nano", num_classes=3).state_dict()
    torch.save({"state_dict": weights, "epoch": 3}, folder / "x.pth")
    torch.save(weights, folder / "old.pth", _use_new_zipfile_serialization=False)
    save_file(weights, folder / "x.safetensors")
    np.savez(folder / "x.npz", **{name: tensor.numpy() for name, tensor in weights.items()})
    shutil.copy(tiny_folder() / "checkpoints" / "last.ckpt", folder / "x.ckpt")


def predict(*words: str) -> int:
    Image.new("RGB", (40, 40)).save("image.png")
    return command("predict", *words, "image.png")


def predict_weights(file: str) -> int:
    if Random(os.path.getsize(file) if os.path.isfile(file) else 0).random() < 0.3:
        return command("convert", file, "out.safetensors", "--model", "ravlt_nano")
    return predict("--model", "ravlt_nano", "--checkpoint", file)


def write_coco(folder: Path) -> None:
    for split in ("train", "val"):
        write_image(folder / f"{split}2017" / "a.jpg", (20, 30))
        path = folder / "annotations" / f"instances_{split}2017.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(coco_content()))


def write_labels(folder: Path) -> None:
    for name in "abcd":
        Image.new("RGB", (33, 32)).save(folder / f"{name}.png")
    (folder / "labels.csv").write_text(
        "file,labels,split\na.png,cat|dog,val\nb.png,,train\nc.png,cat,train\nd.png,dog,val\n"
    )


def write_spoken(folder: Path) -> None:
    write_an4(folder, {"a": ["LOW", "MID LOW"], "b": ["HIGH"]}, {"c": ["MID"]})


def write_tokenized(folder: Path) -> None:
    import tokenizers

    write_texts(folder)
    known = tokenizers.Tokenizer(tokenizers.models.BPE({"</s>": 0, **{chr(n): n for n in range(32, 127)}}, []))
    known.add_special_tokens(["</s>"])
    known.save(str(folder / "tokenizer.json"))


def write_latents(folder: Path) -> None:
    about = {"class_names": ["a", "b"], "vae": "x", "scale": 0.2, "shift": 0.0, "channels": 4, "size": [4, 4]}
    (folder / "latents.json").write_text(json.dumps(about))
    for split in ("train", "val"):
        (folder / split).mkdir()
        tensors = {"moments": torch.zeros(3, 2, 8, 4, 4).half(), "labels": torch.tensor([0, 1, 0])}
        save_file(tensors, folder / split / "0.safetensors")


def check(*settings: str) -> int:
    return command("data", "check", ".", *settings)


STREAMED = torch.linspace(-1, 1, 3 * 64 * 32).view(1, 3, 64, 32)


@cache
def streaming() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("mavit_nano", num_classes=3).eval()


class InterruptError(BaseException):
    """Not an Exception, so that nothing on the way catches it."""


def write_spill(stop: int, folder: Path) -> None:
    """A computation that is complete, or was interrupted after so many lines of progress."""
    from linvit.streaming.journal import Journal

    note, lines = Journal.note, iter(range(10**6))

    def noted(self: Journal, *arguments: int) -> None:
        note(self, *arguments)
        if next(lines) == stop:
            raise InterruptError

    Journal.note = noted  # type: ignore[method-assign]
    try:
        streamed(folder)
    except InterruptError:
        pass
    finally:
        Journal.note = note  # type: ignore[method-assign]


def streamed(folder: Path | str | None) -> tuple[torch.Tensor, ...]:
    given = run_in_strips(streaming(), STREAMED, rows=32, keep=["maps"], spill=folder)
    return given.logits, *(each.read(0, each.shape[2]).clone() for each in given.maps.values())


def stream_again() -> int:
    """Raises AssertionError for another result than that without the folder."""

    def again() -> None:
        assert all(map(torch.equal, streamed("."), streamed(None))), "another result"

    return call(again)


LIBRARY = """
import ctypes, sys, torch
from pathlib import Path
from linvit.kernels.cpu import compiling
compiling.SOURCES = [Path("nothing.cpp").absolute()]
try:
    compiling.compile_library("none", Path.cwd())
except ValueError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
assert list((ctypes.c_int * 4096).in_dll(ctypes.CDLL("./linvit_cpu_none.so"), "nothing"))[:2] == [7, 0]
"""


def load_library() -> int:
    """In a process that has not loaded the library before."""
    done = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, timeout=80, check=False)
    print(done.stderr, file=sys.stderr)
    return done.returncode


def write_library(folder: Path) -> None:
    (folder / "nothing.cpp").write_text("int nothing[4096] = {7};")
    subprocess.run([sys.executable, "-c", LIBRARY], cwd=folder, check=True)


def formats(suffix: str, make: Callable[[Path], Any], files: str = "x*", facts: str = IMAGES) -> Reader:
    return Reader(make, files, partial(predict_exported, f"x{suffix}"), facts)


READERS: dict[str, dict[str, Reader]] = {
    "ONNX files": {
        "images": formats(".onnx", write_onnx),
        "language": Reader(
            partial(write_sequence_onnx, "language"),
            "x.onnx",
            partial(command, "generate", "x.onnx", "--prompt=a", "--tokens=3"),
            sequence_facts("language"),
        ),
        "speech": Reader(partial(write_sequence_onnx, "speech"), "x.onnx", transcribe, sequence_facts("speech")),
    },
    "OpenVINO files": {"images": formats(".xml", write_openvino, "x.xml x.bin")},
    "ExecuTorch files": {"images": formats(".pte", partial(write_format, ".pte"))._replace(may_abort=True)},
    "Core ML files": {
        "images": formats(".mlpackage", partial(write_format, ".mlpackage"), "x.mlpackage/*.json x.mlpackage/*/*/*.*")
    },
    "hub folders": {"images": Reader(write_hub_folder, "config.json model.safetensors", partial(predict, "."))},
    "weights": {
        name: Reader(write_weights, name, partial(predict_weights, name))
        for name in ("x.pth", "old.pth", "x.safetensors", "x.npz")
    }
    | {"x.ckpt": Reader(write_weights, "x.ckpt", partial(predict, "x.ckpt"))},
    "data": {
        "VOC": Reader(write_voc, "Annotations/*.xml Annotations/*.xml ImageSets/Main/*.txt", check),
        "YOLO": Reader(write_yolo, "labels/*/*.txt data.yaml", check),
        "masks": Reader(write_masks, "*/*/masks/*.png", check),
        "maps of objects": Reader(write_id_maps, "*/PedMasks/*.png", check),
        "label maps": Reader(write_label_maps, "*annot/*.png classes.txt", check),
        "COCO": Reader(write_coco, "annotations/*.json", check),
        "panoptic": Reader(write_panoptic, "annotations/*.json annotations/*/*.png", check),
        "labels": Reader(write_labels, "labels.csv *.png", check),
        "speech": Reader(write_speech, "*/*/*/*.txt */*/*/*.wav */*/*/*.flac", check),
        "AN4": Reader(write_spoken, "etc/* wav/*/*/*.sph", check),
        "texts": Reader(write_tokenized, "tokenizer.json */*.txt", partial(check, "data.tokenizer=tokenizer.json")),
        "latents": Reader(write_latents, "latents.json */*.safetensors", check),
    },
    "spill folders": {
        "complete": Reader(partial(write_spill, 10**6), "progress.pt *.map", stream_again, refuses=()),
        "interrupted": Reader(partial(write_spill, 9), "progress.pt *.map", stream_again, refuses=()),
    },
    "compiled libraries": {
        "nothing": Reader(write_library, "linvit*", load_library, refuses=()),
    },
}
"""Kind of reader → name → reader."""
