from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import timm
import torch
from test_all_models import create
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from evidence.gpu.graphs import pretended
from linvit import kernels
from linvit.kernels import record
from linvit.models.backbone import Stage
from linvit.ops import backend

NANO = ("ravlt_nano", "mavit_nano", "care_nano")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("mavit_nano", "nalaformer_xtiny", "hvittt_tiny")]
PRODUCTS = ("convolution", "mm", "addmm", "bmm")
CONVOLUTION = torch.ops.aten.convolution.default


class Storages(TorchDispatchMode):
    """Every storage that an operator returns."""

    def __init__(self):
        super().__init__()
        self.bytes = {}
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        depthwise = function is CONVOLUTION and args[8] > 1
        self.calls["depthwise" if depthwise else function.overloadpacket.__name__] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.bytes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, known):
        return sum(
            count for place, (reference, count) in self.bytes.items() if place not in known and not reference.expired()
        )


def kept(name, what):
    """GB that live after the forward pass of 64 images of 224 px with linvit's kernels, without memory; backward GMACs.

    Everything is bfloat16; kernels do not count as MACs.
    """
    network = timm.create_model(name, drop_path_rate=0.0).train()
    network.set_recomputing(what)
    network.to(device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    images = torch.empty(64, 224, 224, 3, dtype=torch.bfloat16, device="meta").permute(0, 3, 1, 2)
    known = {x.untyped_storage()._cdata for x in (images, *network.parameters(), *network.buffers())}
    with ExitStack() as stack:
        stack.enter_context(pretended(record.CALLS))
        stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda _: False))  # knows no "meta"
        stack.enter_context(patch.object(backend, "_has_passed", lambda _, calls: record.passed(None, calls)))
        stack.enter_context(patch.object(backend, "_ready", lambda *_: kernels))
        with Storages() as storages:
            loss = network(images).float().logsumexp(-1).sum()
            alive = storages.alive(known)
        with FlopCounterMode(display=False) as counted:
            loss.backward()
    return alive / 1e9, counted.get_total_flops() / 2e9


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("ravlt_small_linear", 5.2, 2.95),
        pytest.param("ravlt_tiny", 3.1, 1.7, marks=pytest.mark.slow),
        pytest.param("care_s0", 1.95, 0.8, marks=pytest.mark.slow),
    ],
)
def test_what_a_training_step_keeps(name, before, after):
    (plain, macs), (cheap, macs_again) = kept(name, "nothing"), kept(name, "cheap")
    assert 0.95 * before < plain < before
    assert 0.9 * after < cheap < after
    assert macs <= macs_again < 1.004 * macs  # depthwise convolutions that are none of the kernels'


def step(network, x, what):
    torch.manual_seed(0)  # of stochastic depth
    network.set_recomputing(what)
    network.zero_grad()
    with Storages() as storages:
        network(x).square().sum().backward()
    return (
        [p.grad.clone() for p in network.parameters()],
        {k: v.clone() for k, v in network.state_dict().items()},
        storages,
    )


@pytest.mark.parametrize("name", ["ravlt_nano", "care_nano", *OTHERS])
def test_gradients_and_statistics_are_the_same_bit_for_bit(name):
    small = {"depths": (1, 1, 1, 1)} if "nano" not in name else {}
    network = create(name, drop_path_rate=0.3, **small).double().train()
    x = torch.randn(3, 3, 64, 32, dtype=torch.float64)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    runs = {}
    for what in ("nothing", "cheap", "blocks"):
        network.load_state_dict(before)
        runs[what] = step(network, x, what)
    for what in ("cheap", "blocks"):
        for one, other in zip(runs["nothing"][0], runs[what][0], strict=True):
            assert torch.equal(one, other)
        assert all(torch.equal(value, runs[what][1][key]) for key, value in runs["nothing"][1].items())


@pytest.mark.parametrize("name", ["ravlt_nano", "care_nano"])
def test_only_cheap_operators_are_computed_twice(name):
    network, x = create(name).train(), torch.randn(2, 3, 64, 64)
    calls = {what: step(network, x, what)[2].calls for what in ("nothing", "cheap", "blocks")}
    products = {what: sum(counted[name] for name in PRODUCTS) for what, counted in calls.items()}
    assert products["cheap"] == products["nothing"] < products["blocks"]
    assert calls["cheap"]["depthwise"] > calls["nothing"]["depthwise"]
    assert calls["cheap"]["gelu"] > calls["nothing"]["gelu"]


def test_nothing_is_wrapped_without_gradients():
    network, x = create("care_nano").eval(), torch.randn(1, 3, 32, 32)
    network.set_recomputing()
    with torch.no_grad(), patch("linvit.models.recomputing.checkpoint") as checkpoint:
        network(x)
    checkpoint.assert_not_called()


@pytest.mark.slow
@pytest.mark.parametrize("name", NANO)
def test_compiled_as_one_graph(name):
    network, x = create(name).double().train(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = step(network, x, "cheap")[0]
    torch.compiler.reset()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    network.zero_grad()
    compiled(x).square().sum().backward()
    for one, other in zip(expected, network.parameters(), strict=True):
        assert_close(one, other.grad)


def test_a_stage_says_what_it_recomputes():
    network = create("ravlt_nano")
    assert {stage.recomputed for stage in network.stages if isinstance(stage, Stage)} == {"nothing"}
    network.set_grad_checkpointing()
    assert {stage.recomputed for stage in network.stages} == {"blocks"}
    network.set_grad_checkpointing(False)
    assert {stage.recomputed for stage in network.stages} == {"nothing"}
    with pytest.raises(ValueError, match=r"^`what` is 'all', expected one of nothing, cheap, blocks: change it"):
        network.set_recomputing("all")
