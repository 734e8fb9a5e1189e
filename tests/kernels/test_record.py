"""What a record of the Triton kernels holds for: their code, wherever it is written and however it looks."""

import ast
import shutil

import pytest

from linvit.formulas.values import OPERATIONS
from linvit.kernels import record

SNIPPET = '''
"""Docstring."""
from a import b as c

X: dict[int, tuple[float, ...]] = {1: (1.5, -0.0), **c}
"""What X is."""

@c.jit
def f(x, /, y=None, *z, w: "int" = ..., **rest) -> None:
    """Docstring."""
    global X
    match x:
        case {"é": [1, *_]} | None:
            return f"{x!r:>{y}} {x=}" "é\\n"
    return lambda *, a, b=b"\\0": (a := x[1:, ::2], 1j, None)  # a comment
'''


@pytest.fixture
def folder(tmp_path):
    """The files of the kernels, to change them."""
    for file in record.SHIPPED.parent.glob("*.py"):
        shutil.copy(file, tmp_path)
    return tmp_path


def changed(folder, name, old, new):
    """The functions whose digests change if this text of a file does."""
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    now = record.digests.__wrapped__(folder)
    return {call for call, digest in now.items() if digest != record.digests()[call]}


def test_the_digest_of_a_text_is_the_same_in_every_python(tmp_path):
    (tmp_path / "a.py").write_text(SNIPPET)
    assert (
        record.digest_of_files([tmp_path / "a.py"])
        == "b892aa2c671afc0696131a19203810b330a29b0ff118c94afc8220cf988a2444"
    )


def test_layout_comments_docstrings_and_names_of_files_are_not_code(tmp_path):
    files = [tmp_path / name for name in ("a.py", "b.py", "c.py", "d.py")]
    texts = [SNIPPET, "x = 1", ast.unparse(ast.parse(SNIPPET)).replace("Docstring.", "Other"), "# new\nx = (\n    1\n)"]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    digest = record.digest_of_files(files[:2])
    assert record.digest_of_files(map(str, files[3:1:-1])) == digest
    files[1].write_text("x = 2")
    assert record.digest_of_files(files[:2]) != digest


def test_moved_and_reformatted_definitions_keep_the_digests(folder):
    tiles = (folder / "tiles.py").read_text()
    at = tiles.index("@triton.jit\ndef features(")
    (folder / "tiles.py").write_text(tiles[:at])
    (folder / "more.py").write_text("# moved\n" + ast.unparse(ast.parse(tiles[at:])))
    assert not changed(folder, "launch.py", "def room(", "# other\n\n\ndef room(")
    assert not changed(
        folder, "causal_launch.py", "of causal attention into three tensors; returns", "of causal attention; returns"
    )


def test_a_change_concerns_the_calls_that_use_it(folder):
    bidirectional, causal, softmax, depthwise, product = (set(calls) - {"formulas"} for calls in record.CALLS.values())
    for name, old, new, calls in (
        ("launch.py", "\nFLOAT32 = {16: Setting(64", "\nFLOAT32 = {16: Setting(32", bidirectional | causal),
        ("launch.py", "stages: int = 3", "stages: int = 2", bidirectional | causal | softmax),
        ("state.py", "3.4028234663852886e38", "3e38", {"forward", "causal_forward"}),
        ("causal.py", "\n    S = ", "\n    S = 1 + ", causal),
        ("short.py", "shift = 0.0", "shift = 1.0", {"forward"}),
        (
            "device_code.py",
            "ex2.approx.ftz.f32 $0, $1;",
            "ex2.approx.f32 $0, $1;",
            bidirectional | causal | softmax | depthwise | product,
        ),
        ("support.py", "PADDED = (16, ", "PADDED = (", bidirectional | causal | softmax),
        ("softmax.py", "tl.where(mass == 0, 1.0, mass)", "mass", {"softmax_forward"}),
        ("softmax_launch.py", "\nAMPLE = 1", "\nAMPLE = 2", {"softmax_backward"}),
        ("depthwise.py", "tl.minimum(first + ROWS, height)", "height", depthwise),
        ("depthwise_launch.py", "\nNEAR_BACK = {5: 4", "\nNEAR_BACK = {5: 8", {"depthwise_backward"}),
        ("product.py", "tl.rsqrt(variance + eps)", "tl.rsqrt(variance)", product),
        ("product_launch.py", "\nDEPTH = 64", "\nDEPTH = 32", product),
        ("operator.py", "nothing = inputs.query.new_empty(0", "nothing = inputs.query.new_zeros(0", set()),
    ):
        shutil.copy(folder / name, folder / "kept")
        assert changed(folder, name, old, new) == calls, old
        shutil.move(folder / "kept", folder / name)


def test_device_code_of_names_counts(monkeypatch):
    before = record.digest_of_formulas.__wrapped__()
    assert record.digest_of_formulas.__wrapped__() == before
    monkeypatch.setitem(OPERATIONS, "exp", OPERATIONS["exp"]._replace(triton="tl.exp({})"))
    assert record.digest_of_formulas.__wrapped__() != before


@pytest.mark.slow
def test_every_kernel_counts(folder):
    files = [
        folder / f"{name}.py"
        for name in (
            "causal",
            "depthwise",
            "device_code",
            "product",
            "read",
            "short",
            "softmax",
            "state",
            "state_backward",
            "tiles",
        )
    ]
    kernels = [
        node.name for file in files for node in ast.parse(file.read_text()).body if getattr(node, "decorator_list", ())
    ]
    assert len(kernels) > 30
    for file in files:
        for name in kernels:
            if f"def {name}(" in file.read_text():
                assert changed(folder, file.name, f"def {name}(", f"def {name}(_one_more, "), name
                (folder / file.name).write_text((record.SHIPPED.parent / file.name).read_text())
