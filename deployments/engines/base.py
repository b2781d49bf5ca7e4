"""The engine contract: everything a batch loop may rely on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

from deployments.artifacts.manifest import ArtifactManifest, Candidate, EngineOptions
from deployments.artifacts.types import Device, ModelHead, Precision
from deployments.errors import EngineFailed, ManifestInvalid
from deployments.messages import Batch, Outputs


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Turn whatever an engine raises into EngineFailed about `name`; the original is the cause.

    Engines share no base class: ONNX Runtime's exceptions derive from Exception directly,
    OpenVINO's are what pybind makes of C++, torch and safetensors each have their own.
    """
    try:
        yield
    except Exception as exc:
        raise EngineFailed(f"{name}: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec:
    """All that an engine must know of a graph to open it, sealed or not."""

    path: Path
    device: Device
    precision: Precision
    engine: Literal["onnxruntime", "openvino", "torch"]
    options: EngineOptions
    head: ModelHead
    mask_token: int | None = None  # for ModelHead.MASKS

    @classmethod
    def of(cls, directory: Path, manifest: ArtifactManifest, candidate: Candidate) -> Self:
        """The spec of a sealed candidate; `directory` is that of the artifact."""
        if candidate.engine == "transformers":
            raise ManifestInvalid(f"{directory}: {candidate.engine} runs models that generate only")
        return cls(
            path=directory / candidate.graph,
            device=candidate.device,
            precision=candidate.precision,
            engine=candidate.engine,
            options=candidate.options,
            head=manifest.head,
            mask_token=manifest.mask_token,
        )

    @property
    def compute_type(self) -> str:
        """The value of the x-compute-type header, such as "cpu-int8"."""
        return f"{self.device}-{self.precision}"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine, as data."""

    compute_type: str  # the value of the x-compute-type header, such as "cpu-int8"
    supports_unpooled: bool = False  # answers batches that ask for the vectors of all tokens


class EncoderEngine(Protocol):
    """One loaded graph."""

    info: EngineInfo

    def run(self, batch: Batch) -> Outputs:
        """One blocking forward pass; safe to call from several threads at once.

        Raises EngineFailed when the device gave up, and for a batch that asks for `unpooled`
        where `info` does not say that the engine gives them. Outputs that are not finite are the
        caller's to refuse, item by item.
        """
        ...

    def close(self) -> None:
        """Give the memory back; the engine cannot be used afterwards."""
        ...
