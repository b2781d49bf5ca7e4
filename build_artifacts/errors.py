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

import errno

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


def first_line(exc: BaseException) -> str:
    """Return the first line of the message, or the exception type if there is no message."""
    if isinstance(exc, KeyError):  # its message is only the key
        return f"unknown key {exc}"
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


def convert_library_error(exc: Exception, message: str, hint: str) -> Exception:
    """Return the error to raise for `exc`, which a library raised while it handled a model.

    This is MemoryError for a lack of memory and OSError for a full disk, which say nothing about
    the model: a later build resumes. Anything else becomes UnsupportedModel with `message`.
    """
    if _lacks_memory(exc):
        return MemoryError(first_line(exc))
    if _is_full_disk(exc):
        return OSError(errno.ENOSPC, first_line(exc))
    return UnsupportedModel(f"{message}: {first_line(exc)}", hint=hint)


def _lacks_memory(exc: Exception) -> bool:
    text = str(exc)
    return (
        isinstance(exc, MemoryError)
        or (isinstance(exc, OSError) and exc.errno == errno.ENOMEM)
        or any(part in text for part in _NO_MEMORY)
    )


def _is_full_disk(exc: Exception) -> bool:
    is_full = isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or _FULL_DISK in str(exc)


_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
# NumPy's OSError for a full disk has no number, only this text between two numbers of values.
_CUT_WRITE = " requested and "
# Libraries in Rust, such as tokenizers and safetensors, end the texts of their errors so.
_FULL_DISK = f"(os error {errno.ENOSPC})"
# torch has no class of its own for a failed allocation on the CPU.
_NO_MEMORY = ("DefaultCPUAllocator", "CUDA out of memory", f"(os error {errno.ENOMEM})")


def is_write_failure(error: Exception) -> bool:
    """Return whether `error` says that the disk is full, or that files cannot be written."""
    if isinstance(error, OSError):
        return error.errno in _NOT_WRITABLE or _CUT_WRITE in str(error)
    return _FULL_DISK in str(error)
