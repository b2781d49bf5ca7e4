"""Kinds of CUDA errors, in the exceptions of torch, Triton, ONNX Runtime and TensorRT."""

from __future__ import annotations

import re

from deployments.error_causes import list_causes
from deployments.errors import EngineLost

# Errors after which every further CUDA call of the process fails: only a new process helps.
# The codes are those of the CUDA runtime (`cudaError_t`).
_LOST_CODES = {
    214,  # ECC error that cannot be corrected
    220,  # NVLink error that cannot be corrected
    700,  # illegal address
    702,  # launch timeout
    709,  # context is destroyed
    710,  # assertion on the device
    714,  # hardware stack error
    715,  # illegal instruction
    716,  # misaligned address
    717,  # invalid address space
    718,  # invalid program counter
    719,  # launch failure
}
# Parts of the messages of these errors, for libraries that give no code, such as Triton.
_LOST_MESSAGES = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "an illegal instruction was encountered",
    "misaligned address",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "the launch timed out",
)
_CAPTURE_CODES = range(900, 908)  # cudaErrorStreamCaptureUnsupported and the next ones
_ONNX_RUNTIME_CODE = re.compile(r"CUDA failure (\d+)")
_losses: list[str] = []  # errors after which this process, which has one context, lost it


def check_context() -> None:
    """Raise EngineLost if an error has ended the use of CUDA in this process."""
    if _losses:
        raise EngineLost(f"CUDA cannot be used any more in this process, after: {_losses[0]}")


def remember_loss(error: BaseException) -> None:
    """Let `check_context` fail from now on. `is_context_lost(error)` must be true."""
    _losses.append(str(error))


def is_context_lost(error: BaseException) -> bool:
    """Return whether CUDA cannot be used any more in this process."""
    return any(_is_lost(each) for each in list_causes(error))


def is_capture_failure(error: BaseException) -> bool:
    """Return whether a call failed because it was being captured, so that it may work uncaptured.

    This is False if the call lacked memory or lost the context, even if that also ended the capture
    and the error of its end hides the first one.
    """
    causes = list_causes(error)
    if any(_is_lost(each) or _lacks_memory(each) for each in causes):
        return False
    return any(
        _find_code(each) in _CAPTURE_CODES or "captur" in str(each).lower() for each in causes
    )


def _is_lost(error: BaseException) -> bool:
    text = str(error).lower()
    has_message = "cuda" in text and any(message in text for message in _LOST_MESSAGES)
    return has_message or _find_code(error) in _LOST_CODES


def _lacks_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return "out of memory" in text or "alloc_failed" in text


def _find_code(error: BaseException) -> int | None:
    """Return the code of an error of the CUDA runtime; None if the exception has none."""
    code = getattr(error, "error_code", None)  # of torch.AcceleratorError
    if isinstance(code, int):
        return code
    match = _ONNX_RUNTIME_CODE.search(str(error))
    return int(match[1]) if match else None
