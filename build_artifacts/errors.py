"""What a build can refuse, each with a sentence on what to do about it.

ServeError
└── BuildError
    ├── SourceNotFound    nothing there, or nothing by which to reach it
    ├── SourceUnreadable  there, but a file of it cannot be read
    ├── UnsafeSource      pickled weights, remote code, a path that leads elsewhere
    ├── UnsupportedModel  whole and safe, but nothing this release can build
    └── GateFailed        every graph is too far from the fp32 reference
"""

from __future__ import annotations

from deployments.errors import ServeError


class BuildError(ServeError):
    """Root of the build's own failures; nothing was published."""

    code = "build_failed"

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class SourceNotFound(BuildError):
    """The source, or a file it must have, is not there."""

    code = "source_not_found"


class SourceUnreadable(BuildError):
    """A file or directory of the source is there and cannot be read."""

    code = "source_unreadable"


class UnsafeSource(BuildError):
    """Building from this source could run somebody else's code, or read outside of it."""

    code = "unsafe_source"


class UnsupportedModel(BuildError):
    """A model this release does not know how to build."""

    code = "unsupported_model"


class GateFailed(BuildError):
    """No graph for the CPU answers like the original."""

    code = "gate_failed"
