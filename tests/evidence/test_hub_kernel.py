"""The kernel for the Hub: made, loaded as the library `kernels` does, offline, and the same functions as linvit.ops."""

import json
import os
import subprocess
import sys

import pytest
import torch

from evidence.hub_kernel import BACKENDS, make
from kernels import get_local_kernel
from linvit import ops

OPTIONS = ({"weighting": "query_mean"}, {"normalizer": "magnitude"}, {"feature_map": torch.exp}, {"causal": True})
ALONE = """
import sys
from pathlib import Path


class Hidden:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "linvit":
            raise ImportError("linvit is not installed")


sys.meta_path.insert(0, Hidden())
import torch
from kernels import get_local_kernel

linvit = get_local_kernel(Path(sys.argv[1]))
q, k, v = torch.randn(3, 1, 2, 50, 16, requires_grad=True)
for options in {"weighting": "query_mean"}, {"normalizer": "magnitude"}, {"feature_map": torch.exp}, {"causal": True}:
    out = linvit.linear_attention(q, k, v, **options, backend="triton")
    expected = linvit.attention_scores(q.double(), k.double(), **options) @ v.double()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.autograd.grad(out.sum(), (q, k, v))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("kernel") / "linvit")


def test_the_folder_has_the_format_of_the_hub_and_does_not_need_linvit(folder):
    assert {path.name for path in folder.iterdir()} == {"README.md", "build.toml", "build", "tests", "torch-ext"}
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        facts = json.loads((variant / "metadata.json").read_text())
        assert facts["name"] == "linvit"
        assert facts["backend"] == {"type": backend}
        for path in variant.rglob("*.py"):
            lines = path.read_text().splitlines()
            assert not [line for line in lines if line.strip().startswith(("from linvit", "import linvit"))], path


def test_its_functions_are_those_of_the_operator(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    kernel = get_local_kernel(folder / "build")
    assert {name for name in vars(ops) if name in vars(kernel)} >= {
        "linear_attention",
        "rala",
        "mala",
        "State",
        "merge",
    }
    assert kernel.linear_attention is not ops.linear_attention
    q, k, v = torch.randn(3, 2, 2, 33, 16)
    for options in OPTIONS:
        assert kernel.linear_attention(q, k, v, **options).equal(ops.linear_attention(q, k, v, **options))
    with pytest.raises(ValueError, match="`eps` is -1"):
        kernel.linear_attention(q, k, v, eps=-1.0)


@pytest.mark.slow
def test_its_triton_kernels_run_where_linvit_is_not_installed(folder):
    machine = os.environ | {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", ALONE, folder / "build"], check=True, env=machine, cwd=folder, timeout=300)
