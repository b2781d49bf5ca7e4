"""Memory of ONNX Runtime: one arena for all sessions of a process, and rules to shrink arenas.

Without an arena each pass maps its buffers anew and the kernel clears their pages. That takes 3 to
15 % of the time of a pass. An arena keeps the memory that the largest pass needed. The sessions of
a process share one arena, so its size grows with concurrent passes and not with models. On a GPU,
each session also has its own arena.
"""

from __future__ import annotations

from functools import cache

import onnxruntime as ort

# After a pass with more tokens than this, the arena returns its unused memory, often hundreds of
# megabytes. Large passes gain least from retained memory.
MAX_RETAINED_TOKENS = 1_024
# Unused memory is also returned after this many consecutive passes that each have less than
# SMALL_SHARE of the tokens of the largest pass.
SMALL_PASSES = 64
SMALL_SHARE = 0.25


@cache
def share_arena() -> None:
    """Register the arena of this process, for sessions with `session.use_env_allocators`."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({}))


class ArenaTrimmer:
    """Rule that decides after which passes ONNX Runtime returns unused memory of an arena.

    A GPU is idle while it allocates or returns memory. On a GPU, large passes therefore keep their
    memory, and only a series of small passes returns it. Threads update the counters without a
    lock. A lost update only delays the return of memory.
    """

    def __init__(self, *, is_gpu: bool = False) -> None:
        """Create the trimmer of the CPU arena; with `is_gpu`, also of the arena on a GPU."""
        self._is_gpu = is_gpu
        self._options = ort.RunOptions()
        arenas = "cpu:0;gpu:0" if is_gpu else "cpu:0"
        self._options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arenas)
        self._largest = 0  # tokens of the largest pass since small passes returned memory
        self._small = 0  # consecutive small passes, see SMALL_SHARE

    def options(self, tokens: int) -> ort.RunOptions | None:
        """Return the options for a pass of `tokens` tokens with padding; None: the defaults."""
        if self._is_unused(tokens):
            self._largest = self._small = 0
            return self._options
        # A large pass returns only memory that no pass in another thread uses. It therefore does
        # not reset `_largest`, and later small passes return the rest.
        is_large = tokens > MAX_RETAINED_TOKENS and not self._is_gpu
        return self._options if is_large else None

    def _is_unused(self, tokens: int) -> bool:
        self._largest = max(self._largest, tokens)
        self._small = self._small + 1 if tokens < self._largest * SMALL_SHARE else 0
        return self._small >= SMALL_PASSES


@cache
def find_shared_trimmer() -> ArenaTrimmer:
    """Return the trimmer of the arena that the sessions of this process share."""
    return ArenaTrimmer()
