"""Keep the memory of freed CPU tensors in this process."""

import ctypes
import platform
from typing import Annotated

from linvit.ranges import Range, check

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


def keep_memory(limit: int = 1 << 30) -> bool:
    """Keep freed memory in this process instead of returning it to the system; works with glibc (Linux) only.

    By default glibc maps new memory for every tensor above 32 MiB and unmaps it when the tensor is freed, so that the
    first pass over a new tensor costs a page fault for every 4 KiB. The setting holds until the process ends, and the
    process stays as large as it once was.

    Args:
        limit: in bytes; larger tensors still get new memory each time, and free memory beyond the limit is returned.

    Returns:
        Whether the C library accepted the setting; False without glibc.

    Raises ValueError unless limit is a whole number from 1 to 2³¹ - 1, the C library's maximum.
    """
    check({"limit": Annotated[int, Range(1, (1 << 31) - 1)]}, {"limit": limit})
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(setting, limit) == 1 for setting in (MMAP_THRESHOLD, TRIM_THRESHOLD))
