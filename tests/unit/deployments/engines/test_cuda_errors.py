"""CUDA errors: which of them end the replica, and which of them only end a capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deployments.engines import cuda_errors
from deployments.engines.base import translate_errors
from deployments.engines.cuda_errors import is_capture_failure
from deployments.errors import EngineFailed, EngineLost, RequirementMissing, hide_details
from deployments.health import WorkerHealth


class FakeAcceleratorError(RuntimeError):
    """A fake of torch.AcceleratorError, which has the code of the CUDA runtime."""

    def __init__(self, code: int, message: str = "CUDA error: some message") -> None:
        super().__init__(message)
        self.error_code = code


LOST = [
    *(FakeAcceleratorError(code) for code in (214, 700, 710, 716, 719)),
    *(RuntimeError(f"[ONNXRuntimeError] CUDA failure {code}: text") for code in (700, 710, 719)),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
]
USABLE = [
    *(FakeAcceleratorError(code) for code in (1, 2, 9, 900, 901, 907)),
    RuntimeError("CUDA failure 2: out of memory"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDNN failure 7000: text"),
    RuntimeError("a misaligned address in a file"),
]
CAPTURE_FAILURES = [
    *(FakeAcceleratorError(code) for code in (900, 901, 907)),
    RuntimeError("CUDA failure 900: operation not permitted when stream is capturing"),
    RuntimeError("Cannot call CUDAGeneratorImpl::seed during CUDA graph capture"),
]


@pytest.fixture(autouse=True)
def _usable_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_errors, "_losses", [])


def translate(error: Exception) -> EngineFailed:
    with pytest.raises(EngineFailed) as failure, translate_errors("graph"):
        raise error
    return failure.value


@pytest.mark.parametrize("error", LOST, ids=str)
def test_replica_is_replaced_after_an_error_that_ends_the_context(error: Exception) -> None:
    translated = translate(error)
    assert str(translated) == f"graph: {error}"
    worker = WorkerHealth("a model")
    worker.record_failure(hide_details(translated))
    with pytest.raises(EngineLost):
        worker.check()
    with pytest.raises(EngineLost, match="cannot be used any more"):
        cuda_errors.check_context()  # also after the error of a load or a tuning


@pytest.mark.parametrize("error", USABLE, ids=str)
def test_other_errors_fail_only_their_call(error: Exception) -> None:
    assert type(translate(error)) is EngineFailed
    cuda_errors.check_context()


def test_error_behind_a_later_one_ends_the_replica_too() -> None:
    """The end of a capture fails after a failed call, and hides its error."""
    later = FakeAcceleratorError(901)
    later.__context__ = FakeAcceleratorError(700)
    assert type(translate(later)) is EngineLost


@pytest.mark.parametrize("kind", [EngineLost, RequirementMissing])
def test_errors_with_a_meaning_of_their_own_pass_unchanged(kind: type[EngineFailed]) -> None:
    error = kind("a reason")
    assert translate(error) is error


@pytest.mark.parametrize("error", CAPTURE_FAILURES, ids=str)
def test_errors_of_captures_are_recognized(error: Exception) -> None:
    assert is_capture_failure(error)


def build_error_in_capture(first: Exception) -> Exception:
    error = FakeAcceleratorError(901)
    error.__context__ = first
    return error


@pytest.mark.parametrize("wrap", [lambda error: error, build_error_in_capture], ids=["", "behind"])
@pytest.mark.parametrize(
    "error",
    [
        FakeAcceleratorError(700),
        FakeAcceleratorError(719),
        RuntimeError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=str,
)
def test_errors_of_captured_calls_are_none_of_captures(
    error: Exception, wrap: Callable[[Exception], Exception]
) -> None:
    assert not is_capture_failure(wrap(error))
