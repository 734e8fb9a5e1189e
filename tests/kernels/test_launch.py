"""Starting kernels where shared memory is short; needs no GPU."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.errors import OutOfResources  # noqa: E402

from linvit.kernels import launch  # noqa: E402


class Kernel:
    """Stands for `read`, with 60 KB per stage."""

    arg_names = ("ROWS", "STAGES")
    fn = launch.read.fn

    def __init__(self, available):
        self.available = available
        self.tried = []

    def __getitem__(self, grid):
        def start(*arguments, num_stages, STAGES, **shape):
            assert num_stages == STAGES
            self.tried.append(num_stages)
            if 60 * num_stages > self.available:
                raise OutOfResources(60 * num_stages, self.available, "shared memory")

        return start


def call(heads=8, tokens=3136, processors=132):
    tensors = [torch.empty(1, heads, tokens, 64, dtype=torch.bfloat16, device="meta")] * 3
    inputs = launch.Inputs(*tensors, (None, None), None, None, None)
    return launch.Call(inputs, launch.Options("elu1", "elu1", False, "divide", 1e-6))


@pytest.mark.parametrize(("available", "tried"), [(227, [3]), (163, [3, 2]), (99, [3, 2, 1])])
def test_as_many_stages_as_there_is_memory_for(available, tried):
    kernel = Kernel(available)
    call().start(kernel, 1)
    assert kernel.tried == tried
    call().start(kernel, 1)
    assert kernel.tried == [*tried, tried[-1]]


def test_a_kernel_too_large_for_the_gpu_says_so():
    with pytest.raises(OutOfResources, match="shared memory"):
        call().start(Kernel(48), 1)


@pytest.mark.parametrize(
    ("heads", "tokens", "splits"),
    [
        (8, 3136, 49),  # all tiles of 64: even so the GPU is not full
        (8, 12544, 50),  # full once
        (512, 3136, 3),  # four turns, with 16 tiles for each program
        (512, 784, 1),
        (4096, 12544, 1),
        (1, 1, 1),
    ],
)
def test_programs_for_each_head(monkeypatch, heads, tokens, splits):
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    assert call(heads, tokens).splits("read", tokens) == splits


@pytest.mark.parametrize(("heads", "tokens", "at_once"), [(512, 784, 1), (512, 3136, 0), (8, 196, 1), (8, 784, 0)])
def test_short_sequences_take_one_launch(monkeypatch, heads, tokens, at_once):
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    assert call(heads, tokens).splits_at_once() == at_once


@pytest.mark.parametrize(("heads", "splits"), [(8, 4), (64, 3), (512, 1)])
def test_programs_that_wait_for_each_other_are_all_there(monkeypatch, heads, splits):
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    monkeypatch.setattr(launch, "WAITING", True)
    assert call(heads, 196).splits_at_once() == splits
