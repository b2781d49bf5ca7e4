"""Options of ONNX Runtime's TensorRT provider: precision, range of shapes, and caches.

TensorRT compiles a graph to an engine for a range of shapes, the profile. This takes minutes. The
engine and its timing cache are therefore stored with the artifact, in the folder for this kind of
host. The timing cache holds the measured times of kernels.
https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from ctypes.util import find_library
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import onnxruntime as ort

from deployments.artifacts.types import Precision
from deployments.engines.graph_io import MASK_POSITIONS, Bucket
from deployments.errors import RequirementMissing
from deployments.host.machine import installed_versions

log = logging.getLogger("ray.serve.hundredfold")

TENSORRT = "TensorrtExecutionProvider"
_MODULE = "tensorrt_libs"  # module in NVIDIA's packages on PyPI
_PACKAGES = ("tensorrt-cu13-libs", "tensorrt-cu12-libs")
_ADVICE = "pip install 'tensorrt-cu13-libs>=10,<11'"
# The onnxruntime-gpu version in constraints.txt is linked with this major version of the libraries.
# A library may depend on the libraries before it.
_LIBRARIES = ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10")
_FOLDER = "tensorrt"
# The provider reads booleans only in this form.
_ON = "True"


@cache
def missing_tensorrt() -> str | None:
    """Return why the TensorRT provider of this ONNX Runtime build cannot start, or None."""
    if _LIBRARIES[0] in (find_library("nvinfer"), *(path.name for path in _find_in_package())):
        return None
    return f"TensorRT 10 is not installed: `{_LIBRARIES[0]}` is missing (`{_ADVICE}`)"


@cache
def load_tensorrt_libraries() -> None:
    """Load the libraries of NVIDIA's PyPI package; the dynamic linker does not search there.

    Without the package, ONNX Runtime uses the libraries of the system. Raises RequirementMissing if
    a library of the package cannot be loaded.
    """
    for path in _find_in_package():
        try:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as exc:
            raise RequirementMissing(f"TensorRT cannot be loaded: {exc}") from exc


def _find_in_package() -> list[Path]:
    """Return the libraries of NVIDIA's PyPI package; empty without the package."""
    package = find_spec(_MODULE)
    directories = (package.submodule_search_locations or ()) if package else ()
    paths = (Path(directory, name) for directory in directories for name in _LIBRARIES)
    return [path for path in paths if path.exists()]


def build_tensorrt_options(
    graph: Path,
    precision: Precision,
    buckets: Sequence[tuple[int, int]],
    host_folder: Path | None,
) -> dict[str, str]:
    """Return the provider options for `graph`. Without a writable `host_folder` nothing is cached.

    Batches are padded to `buckets`, so the profile covers the smallest to the largest bucket.
    Without buckets TensorRT compiles again for every shape outside the range of earlier shapes.
    """
    options = {"trt_fp16_enable": _ON} if precision == "fp16" else {}
    if buckets:
        options |= _build_profile(_read_inputs(graph), [Bucket(*sides) for sides in buckets])
    if host_folder is not None and (folder := _make_folder(host_folder, graph)) is not None:
        options |= {
            "trt_engine_cache_enable": _ON,
            "trt_engine_cache_path": str(folder),
            "trt_timing_cache_enable": _ON,
            "trt_timing_cache_path": str(folder),
        }
    return options


def _build_profile(inputs: Sequence[str], buckets: Sequence[Bucket]) -> dict[str, str]:
    """Return the profile of all inputs. TensorRT chooses kernels for the bucket of median size."""
    by_size = sorted(buckets, key=lambda bucket: (bucket.items * bucket.tokens, bucket))
    items, tokens = zip(*buckets, strict=True)
    corners: Mapping[str, Bucket] = {
        "min": Bucket(min(items), min(tokens)),
        "opt": by_size[len(by_size) // 2],
        "max": Bucket(max(items), max(tokens)),
    }
    return {
        f"trt_profile_{name}_shapes": ",".join(_format_shapes(inputs, bucket))
        for name, bucket in corners.items()
    }


def _format_shapes(inputs: Sequence[str], bucket: Bucket) -> Iterator[str]:
    for name in inputs:
        is_list = name == MASK_POSITIONS
        yield f"{name}:{bucket.items}" if is_list else f"{name}:{bucket.items}x{bucket.tokens}"


def _read_inputs(graph: Path) -> list[str]:
    """Read the names of the inputs. Needs `onnx`, which the extra `gpu` installs."""
    import onnx

    return [value.name for value in onnx.load(graph, load_external_data=False).graph.input]


def _make_folder(host_folder: Path, graph: Path) -> Path | None:
    """Create a folder for engines of the installed package versions. Return None if that fails."""
    versions = {"onnxruntime": ort.__version__, **installed_versions(_PACKAGES)}
    name = "-".join(f"{package}-{version}" for package, version in versions.items())
    folder = host_folder / _FOLDER / name / graph.stem
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        log.info("%s: the TensorRT engine is compiled at each start: %s", graph.name, exc)
        return None
    return folder
