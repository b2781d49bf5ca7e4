"""CUDA streams for captures: no two open engines of a process use the same one.

torch has 32 streams per device and returns them in turn, so `torch.cuda.Stream()` may return a
stream that is in use. CUDA graphs contain the addresses of the workspaces that cuBLAS has for their
stream. The end of a graph frees the workspaces of its stream, and so those in the graphs of another
engine on the stream.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Streams to draw before none counts as unused: twice those of torch, because other threads may draw
# some of them meanwhile.
_MAX_DRAWS = 64


class CaptureStreams:
    """The streams of all open engines of this process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._used: set[tuple[int, int]] = set()

    def take(self) -> torch.cuda.Stream | None:
        """Return an unused stream of the current device; None if engines use all of them."""
        import torch

        with self._changed:
            for _ in range(_MAX_DRAWS):
                stream = torch.cuda.Stream()
                if _identify(stream) not in self._used:
                    self._used.add(_identify(stream))
                    return stream
        return None

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Let other engines use a stream. The caller has dropped all graphs of the stream."""
        with self._changed:
            self._used.discard(_identify(stream))


def _identify(stream: torch.cuda.Stream) -> tuple[int, int]:
    """Return the device and the address of a stream, which several objects may stand for."""
    return stream.device_index, stream.cuda_stream


CAPTURE_STREAMS = CaptureStreams()
