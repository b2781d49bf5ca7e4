"""The C library's heap, which holds the memory of native libraries.

glibc keeps most of the memory that these libraries free, and the kernel still counts it as used by
the process. After a model is loaded, glibc keeps half the size of the model's graph. After the
model is closed, it keeps the full size.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache


def return_free_memory() -> None:
    """Return free memory to the operating system. Takes milliseconds. Without glibc, do nothing."""
    if platform.libc_ver()[0] == "glibc":
        _load_c_library().malloc_trim(ctypes.c_size_t(0))


@cache
def _load_c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
