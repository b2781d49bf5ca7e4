"""The C library's heap, which holds the memory of native libraries.

glibc keeps most of what they free. A model leaves half the size of its graph when it has been
loaded, and all of it when it is closed.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache


def return_free_memory() -> None:
    """Return free memory to the operating system, in milliseconds. Does nothing without glibc."""
    if platform.libc_ver()[0] == "glibc":
        _load_c_library().malloc_trim(ctypes.c_size_t(0))


@cache
def _load_c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
