import platform
import subprocess
import sys

import pytest

from linvit.allocator import keep_memory

FAULTS = """
import resource, torch
from linvit.allocator import keep_memory
torch.set_num_threads(1)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(16):
        torch.ones(12 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
assert keep_memory()
after = faults()
assert after < before / 4, (before, after)  # the heap grows once, or twice if something is in its way
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_large_tensors_reuse_freed_memory():
    subprocess.run([sys.executable, "-c", FAULTS], check=True)


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_memory() is False


@pytest.mark.parametrize("limit", [0, -1, 1 << 31])
def test_a_limit_that_the_library_cannot_hold_is_refused(limit):
    with pytest.raises(ValueError, match=f"`limit` is {limit}, expected a whole number from 1 to"):
        keep_memory(limit)
