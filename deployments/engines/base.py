"""Interfaces of inference engines: kinds of engines, graphs to open, and open encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from deployments.artifacts.manifest import ArtifactManifest, Candidate, EngineOptions
from deployments.artifacts.types import Device, EngineName, ModelHead, Precision
from deployments.config import EncoderSettings, HardwareSettings
from deployments.engines.cuda_errors import is_context_lost, remember_loss
from deployments.engines.decoder import DecoderFactory
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import EngineFailed, EngineLost, RequirementMissing


class translate_errors:
    """Context manager that raises any exception as EngineFailed, whose message starts with `name`.

    After an error of CUDA that only a new process survives it raises EngineLost. EngineLost and
    RequirementMissing pass unchanged. The exceptions of engines share no base class: ONNX Runtime
    derives its exceptions from Exception, OpenVINO's come from pybind, torch and safetensors define
    their own.

    This is a class because `contextmanager` would keep the engine in memory: since Python 3.12 its
    frame and the exception refer to each other, and so to the frames that opened the engine.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Do nothing: only an exception matters."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, RequirementMissing | EngineLost):
            raised = EngineFailed
            if is_context_lost(error):
                remember_loss(error)
                raised = EngineLost
            # Failed assertions of torch have no message.
            raise raised(f"{self._name}: {str(error) or type(error).__name__}") from error


# Limit of the scores in a forward pass of a model with the head SPARSE, whose graph computes a
# score per token and vocabulary entry before it pools them. Larger passes are slower on a CPU:
# 0.41 instead of 0.26 ms per token of MiniLM at 2,048 tokens, with 770 instead of 130 MB.
MAX_PASS_SCORES = {Device.CPU: 1 << 23, Device.GPU: 1 << 27}


def limit_pass_tokens(head: ModelHead, output_width: int, device: Device) -> int | None:
    """Return the maximum of padded tokens in a forward pass; None: no limit."""
    return MAX_PASS_SCORES[device] // output_width if head is ModelHead.SPARSE else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec:
    """Description of a graph for the engine that opens it.

    A build also opens graphs before it seals their artifact, when there is no manifest yet.
    """

    path: Path
    device: Device
    precision: Precision
    engine: EngineName
    options: EngineOptions
    head: ModelHead
    mask_token: int | None = None  # id of the mask token, for ModelHead.MASKS
    max_pass_tokens: int | None = None  # padded tokens; larger batches are split. None: no limit
    # Folder in which an engine stores compiled files for this kind of host. None: store nothing.
    host_folder: Path | None = None

    @classmethod
    def of(cls, directory: Path, manifest: ArtifactManifest, candidate: Candidate) -> Self:
        """Return the spec of a candidate of the artifact in `directory`."""
        return cls(
            path=directory / candidate.graph,
            device=candidate.device,
            precision=candidate.precision,
            engine=candidate.engine,
            options=candidate.options,
            head=manifest.head,
            mask_token=manifest.mask_token,
            max_pass_tokens=limit_pass_tokens(
                manifest.head, manifest.output_width, candidate.device
            ),
        )

    @property
    def compute_type(self) -> str:
        """The value of the x-compute-type header, such as "cpu-int8"."""
        return f"{self.device}-{self.precision}"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an open encoder engine."""

    compute_type: str  # the value of the x-compute-type header, such as "cpu-int8"
    supports_unpooled: bool = False  # returns the vectors of all tokens if a batch requests them


class EncoderEngine(Protocol):
    """An open encoder: one graph, or several graphs of one model."""

    info: EngineInfo

    def run(self, batch: Batch) -> Outputs:
        """Run one forward pass. Blocking and thread-safe.

        Raises EngineFailed, for example for an unpooled batch if `info.supports_unpooled` is False.
        Outputs may contain NaN or infinity: the caller checks each item.
        """
        ...

    def close(self) -> None:
        """Release the memory; the engine cannot be used afterwards."""
        ...


class EngineTarget(Protocol):
    """The properties of a candidate or spec that `missing_requirement` checks."""

    @property
    def engine(self) -> EngineName: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def options(self) -> EngineOptions: ...


def _require_nothing(_target: EngineTarget, _hardware: HardwareSettings) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine: its requirements, and the functions that open encoders and decoders.

    Importing the file of an engine is cheap, because only functions in it import the runtime, such
    as onnxruntime or torch.
    """

    packages: tuple[str, ...]  # Python packages that must be installed
    # Names under which pip installs `packages`; empty: the same names. Measurements count only for
    # the versions with which they were made.
    distributions: tuple[str, ...] = ()
    # Returns a sentence about a requirement that this process does not meet, or None. Called only
    # if all `packages` are installed.
    missing_requirement: Callable[[EngineTarget, HardwareSettings], str | None] = _require_nothing
    open_encoder: Callable[[GraphSpec, EncoderSettings], EncoderEngine] | None = None
    open_decoder: DecoderFactory | None = None
