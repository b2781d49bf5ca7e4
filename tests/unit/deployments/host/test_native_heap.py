from __future__ import annotations

import ctypes
import platform

import psutil
import pytest

from deployments.host.native_heap import return_free_memory

BLOCKS = 4_096
BLOCK_BYTES = 16_384  # small enough for the heap; malloc maps larger blocks separately


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed memory")
def test_freed_memory_leaves_the_process() -> None:
    c = ctypes.CDLL(None)
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [c.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:  # the last block keeps free() from shrinking the heap
        c.free(block)
    kept = resident_bytes()
    return_free_memory()
    c.free(blocks[-1])
    assert kept - resident_bytes() > BLOCKS * BLOCK_BYTES * 0.9
