"""How the C library keeps the memory that tensors on a CPU give back."""

import ctypes
import platform
from typing import Annotated

from linvit.ranges import Range, check

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


def keep_memory(limit: int = 1 << 30) -> bool:
    """Keep freed memory in this process instead of handing it back to the system; glibc alone (Linux).

    By default glibc maps every tensor above 32 MiB afresh and unmaps it when it is freed, so that each pass over a new
    tensor pays one page fault every 4 KiB. This holds until the process ends, and the process stays as large as it once
    was.

    Args:
        limit: bytes; a larger tensor is mapped afresh as before, and more free memory than this is handed back.

    Returns:
        Whether the C library took the setting; False where there is no glibc.

    Raises:
        ValueError: unless limit is a whole number from 1 to 2³¹ - 1, the most that the C library takes.
    """
    check({"limit": Annotated[int, Range(1, (1 << 31) - 1)]}, {"limit": limit})
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(setting, limit) == 1 for setting in (MMAP_THRESHOLD, TRIM_THRESHOLD))
