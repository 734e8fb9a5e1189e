"""Starting kernels where shared memory is short; needs no GPU."""

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.errors import OutOfResources  # noqa: E402

from linvit.kernels import launch  # noqa: E402


class Kernel:
    """Stands for a kernel that needs 60 KB per stage."""

    def __init__(self, available):
        self.available = available
        self.tried = []

    def __getitem__(self, grid):
        def start(*arguments, num_stages, **shape):
            self.tried.append(num_stages)
            if 60 * num_stages > self.available:
                raise OutOfResources(60 * num_stages, self.available, "shared memory")

        return start


@pytest.mark.parametrize(("available", "tried"), [(227, [3]), (163, [3, 2]), (99, [3, 2, 1])])
def test_as_many_stages_as_there_is_memory_for(available, tried):
    kernel = Kernel(available)
    launch._start(kernel, (1,), WIDTH=64)
    assert kernel.tried == tried
    launch._start(kernel, (1,), WIDTH=64)
    assert kernel.tried == [*tried, tried[-1]]


def test_a_kernel_too_large_for_the_gpu_says_so():
    with pytest.raises(OutOfResources, match="shared memory"):
        launch._start(Kernel(48), (1,))
