"""When backend="auto" takes the C++ kernel on a CPU, and what it says if it does not."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

from linvit.kernels import cpu
from linvit.kernels.cpu import compiling
from linvit.ops import Rotary, backend, linear_attention, rotary_1d

CAPABILITY = torch.backends.cpu.get_cpu_capability()


@pytest.fixture
def large():
    return torch.randn(3, 1, 4, 1024, 64)


@pytest.fixture
def said(caplog):
    """What linvit logs, as if it had not logged anything in this process before."""
    backend._warn_once.cache_clear()
    return lambda: [record for record in caplog.records if record.name.startswith("linvit")]


def run(code, folder):
    """Runs code in a process without a compiler, for which that folder is the one with the libraries of the wheel."""
    setup = f"""
        import logging, sys
        from pathlib import Path
        import torch
        from linvit.ops import Rotary, backend, linear_attention, rotary_1d
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        backend.PREBUILT = Path({str(folder)!r})
        x = torch.randn(3, 1, 4, 1024, 64)
        expected = linear_attention(*x, backend="torch")
        assert "linvit.kernels" not in sys.modules
        from linvit.kernels.cpu import compiling
        compiling.PREBUILT = backend.PREBUILT
    """
    code = textwrap.dedent(setup) + textwrap.dedent(code)
    environment = {**os.environ, "CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(folder / "none")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")
def test_a_kernel_that_came_compiled_is_used_without_a_call(tmp_path):
    cpu.build()
    cpu.build.cache_clear()  # other tests are of torch; the library stays loaded
    place = compiling._place(tmp_path, CAPABILITY)
    place.parent.mkdir()
    from torch.utils.cpp_extension import _get_build_directory

    name = compiling._name(CAPABILITY)
    shutil.copy(os.path.join(_get_build_directory(name, verbose=False), f"{name}.so"), place)
    code = """
        from linvit.kernels import cpu
        compiled = torch.compile(linear_attention, fullgraph=True, backend="eager")(*x)
        found = linear_attention(*x)
        assert torch.equal(found, linear_attention(*x, backend="cpp")) and torch.equal(found, compiled)
        assert not torch.equal(found, expected)
        with cpu.aside():
            assert torch.equal(linear_attention(*x), expected)
    """
    assert run(code, tmp_path) == []


@pytest.mark.slow
def test_a_compiled_kernel_that_cannot_be_loaded_is_named_once(tmp_path):
    place = compiling._place(tmp_path, CAPABILITY)
    place.parent.mkdir()
    place.write_bytes(b"not a library")
    code = "assert all(torch.equal(linear_attention(*x), expected) for _ in range(2))"
    first, *others = run(code, tmp_path)
    assert first.startswith("The C++ kernel that came with linvit cannot be loaded, plain PyTorch is used: ")
    assert str(place) in first
    assert not any("cannot be loaded" in line for line in others)


@pytest.mark.slow
def test_one_for_another_torch_is_left_alone(tmp_path):
    other = tmp_path / "torch0.1" / compiling._place(tmp_path, CAPABILITY).name
    other.parent.mkdir()
    other.write_bytes(b"not a library")
    (line,) = run("assert torch.equal(linear_attention(*x), expected)", tmp_path)
    assert "linvit.kernels.cpu.build()" in line


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")
def test_where_torch_computes_the_features_the_faster_one_is_chosen(large):
    cpu.build()
    few, narrow = large[:, :, :, :100], large[:, :, :100].unflatten(-1, (-1, 4)).movedim(-2, 2).flatten(2, 3)

    def uses_kernel(tensors, feature_map="focused"):
        return backend.kernel_for("auto", *tensors, feature_map=feature_map) is not None

    def by_user(x):
        return x / x.norm(dim=(1, 3), keepdim=True)

    assert uses_kernel(few)
    assert not uses_kernel(narrow)  # whose heads cost more than they hold
    longer = large.repeat(1, 1, 1, 2, 1)
    assert not uses_kernel(longer)  # which torch computes in blocks that fit into the cache
    assert uses_kernel(longer, by_user)
    assert uses_kernel(longer.requires_grad_())
    cpu.build.cache_clear()  # other tests are of torch; the library stays loaded


@pytest.fixture
def built():
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler here to build the kernel")
    cpu.build()
    yield
    cpu.build.cache_clear()  # other tests are of torch; the library stays loaded


def call(**changes):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 9, 8, generator=generator)
    arguments = {"query": query, "key": key, "value": value, "rotary": rotary_1d(9, 8), **changes}
    return linear_attention(**{name: x(query) if callable(x) else x for name, x in arguments.items()})


def test_a_plain_call_gets_to_the_kernel_without_checks_in_python(built, monkeypatch):
    plain = ({}, {"weighting": "query_mean"}, {"normalizer": "magnitude", "rotary": None, "feature_map": "relu"})
    expected = [call(**{**given, "feature_map": (given.get("feature_map", "elu1"),) * 2}) for given in plain]

    def refuse(*tensors, **options):
        raise AssertionError("checked")

    monkeypatch.setattr(sys.modules["linvit.ops.linear_attention"], "check_call", refuse)
    for given, out in zip(plain, expected, strict=True):
        for choice in ("auto", "cpp"):
            assert torch.equal(call(**given, backend=choice), out)
    learned = Rotary(*(table.clone().requires_grad_() for table in rotary_1d(9, 8)))
    for given in ({"query": lambda x: x.clone().requires_grad_()}, {"rotary": learned}, {"backend": "torch"}):
        with pytest.raises(AssertionError, match="checked"):
            call(**given)


WRONG = {
    "query": (None, 3, lambda x: x[0], lambda x: x.long(), lambda x: x[:, :, :0], lambda x: x.to_sparse()),
    "key": (lambda x: x.to("meta"), lambda x: x[:1], lambda x: x[:, :2], lambda x: x[..., :6], lambda x: x.double()),
    "value": (lambda x: x.to("meta"), lambda x: x[:1], lambda x: x[:, :2], lambda x: x[:, :, :5], lambda x: x.half()),
    "rotary": (
        tuple(rotary_1d(9, 8)),
        rotary_1d(8, 8),
        rotary_1d(9, 4),
        Rotary(None, 3),
        Rotary(*torch.ones(2, 9, 4).long()),
    ),
    "eps": (-1.0, float("nan"), "0", True),
    "feature_map": ("none", 3, ["elu1"]),
    "weighting": ("none", "prefix_query_mean", None),
    "normalizer": ("none such", 3),
    "backend": ("gpu", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_as_without_the_kernel(built, name):
    for value in WRONG[name]:
        with pytest.raises((TypeError, ValueError)) as error:
            call(**{name: value})
        with cpu.aside(), pytest.raises(error.type) as plain:
            call(**{name: value})
        assert str(error.value) == str(plain.value)


def test_what_the_kernel_cannot_take_as_it_is_gets_the_same_output(built):
    tables = rotary_1d(9, 8)
    others = (
        {"rotary": Rotary(*(table.double() for table in tables))},
        {"rotary": Rotary(*(table.expand(2, 1, 9, 4) for table in tables))},
        {"rotary": Rotary(*(table.T.contiguous().T for table in tables))},
        {"feature_map": "focused"},
        {"eps": 0},
    )
    for given in others:
        with cpu.aside():
            expected = call(**given)
        torch.testing.assert_close(call(**given), expected, rtol=1e-5, atol=1e-6)


def test_the_first_large_call_says_how_to_build(said, large):
    linear_attention(*large[:, :, :, :1000])
    linear_attention(*large.double())
    linear_attention(*large, feature_map=("softmax", "softmax_tokens"))
    linear_attention(*large, backend="torch")
    with cpu.aside():
        linear_attention(*large)
    torch.compile(linear_attention, fullgraph=True, backend="eager")(*large)
    torch.func.vmap(linear_attention)(*large.unsqueeze(1))
    assert not said()
    for _ in range(2):
        linear_attention(*large)
    (record,) = said()
    assert record.levelname == "WARNING"
    assert "linvit.kernels.cpu.build()" in record.getMessage()
    assert "\n" not in record.getMessage()
