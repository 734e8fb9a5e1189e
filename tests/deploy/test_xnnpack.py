"""Graphs for XNNPACK: the same outputs, in few pieces."""

import pytest
import timm
import torch
from torch import nn
from torch.export import export
from torch.nn.functional import scaled_dot_product_attention

from linvit import fuse
from linvit.deploy.formats import FORMATS, session_of
from linvit.deploy.graph import SIMPLER, OnPixels, exported, for_xnnpack, sample

pytest.importorskip("executorch", reason="ExecuTorch is not installed")
aten = torch.ops.aten


class Call(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step
        self.register_buffer("order", torch.tensor([3, 1, 0, 2]))

    def forward(self, *inputs):
        return self.step(self, *inputs)


MAP = (2, 6, 5, 7)
HEADS = (2, 3, 5, 4)
CHANGED = {
    "mean over channels": (lambda _, x: x.mean(1, keepdim=True), [MAP]),
    "mean over tokens": (lambda _, x: x.mean(-1, keepdim=True), [HEADS]),
    "product": (lambda _, x, y: x @ y, [HEADS, (2, 3, 4, 6)]),
    "product, one side alone has heads": (lambda _, x, y: x @ y, [HEADS, (4, 6)]),
    "product, broadcast": (lambda _, x, y: x @ y, [HEADS, (2, 1, 4, 6)]),
    "rotation": (lambda self, x: x.index_select(-2, self.order), [(2, 3, 4, 5)]),
    "reciprocal": (lambda _, x: x.exp().reciprocal(), [HEADS]),
    "attention": (lambda _, q, k, v: scaled_dot_product_attention(q, k, v), [HEADS, (2, 3, 6, 4), (2, 3, 6, 4)]),
    "attention, scaled": (lambda _, q, k, v: scaled_dot_product_attention(q, k, v, scale=0.3), [HEADS] * 3),
}
KEPT = {
    "mean of everything": (lambda _, x: x.mean((2, 3)), [MAP]),
    "mean without its dimension": (lambda _, x: x.mean(1), [MAP]),
    "mean over rows": (lambda _, x: x.mean(2, keepdim=True), [MAP]),
    "channels in another order": (lambda self, x: x.index_select(1, self.order), [MAP]),
    "some rows": (lambda self, x: x.index_select(-2, self.order), [MAP]),
    "causal attention": (lambda _, q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), [HEADS] * 3),
    "masked attention": (
        lambda _, q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=torch.eye(5) - 1),
        [HEADS] * 3,
    ),
}


def both(step, shapes):
    """The program of a step for XNNPACK, what it computes, and what is expected."""
    torch.manual_seed(0)
    inputs = tuple(torch.randn(shape) for shape in shapes)
    program = for_xnnpack(export(Call(step), inputs))
    return program, program.module()(*inputs), step(Call(step), *inputs)


def targets(program):
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("name", CHANGED)
def test_simpler_steps_compute_the_same(name):
    program, got, expected = both(*CHANGED[name])
    assert not targets(program) & set(SIMPLER)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", KEPT)
def test_what_has_no_simpler_form_computes_the_same(name):
    _, got, expected = both(*KEPT[name])
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mavit_nano", "ravlt_nano"])
def test_networks_need_steps_of_xnnpack_only(name):
    """The pixels as floats come before its piece, and the mean over all positions after it."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    network = fuse(timm.create_model(name, depths=[1, 1, 1, 1]).eval(), "graph")
    program = exported(OnPixels(network, [0.5] * 3, [0.5] * 3), sample(3, (32, 32), dynamic=False))
    lowered = to_edge_transform_and_lower(for_xnnpack(program), partitioner=[XnnpackPartitioner()])
    nodes = [str(node.target) for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
    assert sum("call_delegate" in node for node in nodes) <= 2
    others = [node for node in nodes if "call_delegate" not in node and "getitem" not in node]
    assert sum("_to_dim_order_copy" in node or "as_strided_copy" in node for node in others) == len(others)


@pytest.mark.slow
def test_files_without_facts_store_no_empty_tensor(tmp_path):
    """ExecuTorch cannot load some of them: it depends on where in the file the tensor lies."""
    from executorch.runtime import Runtime

    path = tmp_path / "network.pte"
    program = export(nn.Linear(3, 2).eval(), (torch.zeros(1, 3),))
    assert session_of(FORMATS[".pte"], program, path) is not None
    assert Runtime.get().load_program(path).method_names == {"forward"}
