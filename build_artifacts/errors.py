"""Errors of a build. Each has a hint with the remedy.

ServeError
└── BuildError
    ├── SourceNotFound    the source or a required file is missing
    ├── SourceUnreadable  a file of the source cannot be read
    ├── UnsafeSource      pickled weights, remote code, a path out of the source
    ├── UnsupportedModel  a model that this release cannot build
    └── GateFailed        no graph passed the accuracy gate

Other modules derive BadEvaluationData and CompactionMismatch from BuildError.
"""

from __future__ import annotations

from deployments.terminal.command_line import HintedError


class BuildError(HintedError):
    """Base of all build errors. A failed build publishes nothing."""

    code = "build_failed"


class SourceNotFound(BuildError):
    code = "source_not_found"


class SourceUnreadable(BuildError):
    code = "source_unreadable"


class UnsafeSource(BuildError):
    """Error for a source whose build could run foreign code or read files outside the source."""

    code = "unsafe_source"


class UnsupportedModel(BuildError):
    code = "unsupported_model"


class GateFailed(BuildError):
    code = "gate_failed"
