"""Errors of libraries become errors of a build, or stay a lack of memory."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from build_artifacts.errors import UnsupportedModel, convert_library_error, is_write_failure
from build_artifacts.recipes import DynamicInt8
from build_artifacts.steps import quantize

TORCH_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 400000000000000 bytes."
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(TORCH_ALLOCATOR),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        Exception("cannot map the weights: Cannot allocate memory (os error 12)"),
    ],
)
def test_lack_of_memory_says_nothing_about_the_model(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(quantize, "_Quantizer", fail)
    with pytest.raises(MemoryError):
        quantize.quantize(tmp_path / "in.onnx", DynamicInt8(), tmp_path / "out.onnx", items=())


@pytest.mark.parametrize(
    "error",
    [
        Exception("Error while serializing: No space left on device (os error 28)"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_full_disk_says_nothing_about_the_model(error: Exception) -> None:
    converted = convert_library_error(error, "the model cannot be traced", hint="")
    assert isinstance(converted, OSError)
    assert is_write_failure(converted)


def test_failed_mapping_of_weights_is_a_lack_of_memory() -> None:
    error = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert isinstance(convert_library_error(error, "it cannot be loaded", hint=""), MemoryError)


def test_other_errors_of_libraries_are_those_of_the_model() -> None:
    converted = convert_library_error(KeyError("swish"), "the graph cannot be read", hint="mend it")
    assert isinstance(converted, UnsupportedModel)
    assert converted.message == "the graph cannot be read: unknown key 'swish'"
    assert converted.hint == "mend it"
