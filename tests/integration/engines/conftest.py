"""Fixtures that open the same tiny model with every installed engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device, ModelHead
from deployments.config import EncoderSettings, GeneratorSettings
from deployments.engines import ENGINES, EncoderEngine, GraphSpec, open_engine
from deployments.engines.decoder import DecoderEngine, DecoderFactory, DecoderSpec
from tests.support.engine_programs import MASK_TOKEN, write_onnx, write_torch

BUCKETS = ((1, 4), (2, 8), (4, 8), (4, 16))
SETTINGS = EncoderSettings(concurrent_passes=2)


OpenRows = Callable[..., DecoderEngine]


@contextmanager
def rows_of(engine: DecoderFactory, spec: DecoderSpec) -> Iterator[OpenRows]:
    """Yield a function that opens decoders of `spec`. Close all of them at the end."""
    with ExitStack() as opened:

        def open_(slots: int = 3, context: int = 128) -> DecoderEngine:
            decoder = engine(spec, GeneratorSettings(), slots=slots, context=context)
            opened.callback(decoder.close)
            return decoder

        yield open_


class ContractEngine(NamedTuple):
    """An engine under test, with the function that writes its tiny model."""

    engine: str
    write: Callable[[Path, ModelHead], None]
    buckets: tuple[tuple[int, int], ...] = ()
    supports_unpooled: bool = True
    rejects_unknown_tokens: bool = True

    @property
    def missing_package(self) -> str | None:
        packages = ENGINES[self.engine].packages
        return next((package for package in packages if find_spec(package) is None), None)


Written = Callable[[ContractEngine, ModelHead], Path]

KINDS = {
    "onnxruntime": ContractEngine("onnxruntime", write_onnx),
    "onnxruntime-in-buckets": ContractEngine("onnxruntime", write_onnx, BUCKETS),
    # OpenVINO returns zeros for an unknown token id.
    "openvino": ContractEngine("openvino", write_onnx, rejects_unknown_tokens=False),
    "openvino-in-buckets": ContractEngine(
        "openvino", write_onnx, BUCKETS, rejects_unknown_tokens=False
    ),
    # A torch program has one output.
    "torch": ContractEngine("torch", write_torch, supports_unpooled=False),
    "torch-in-buckets": ContractEngine("torch", write_torch, BUCKETS, supports_unpooled=False),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> ContractEngine:
    kind = KINDS[request.param]
    if package := kind.missing_package:
        pytest.skip(f"`{package}` is not installed")
    return kind


def spec_of(kind: ContractEngine, path: Path, head: ModelHead = ModelHead.VECTOR) -> GraphSpec:
    return GraphSpec(
        path=path,
        device=Device.CPU,
        precision="fp32",
        engine=kind.engine,
        options=EngineOptions(buckets=kind.buckets),
        head=head,
        mask_token=MASK_TOKEN if head is ModelHead.MASKS else None,
    )


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return a function that writes the tiny model of an engine once. Tests share the file."""
    directory = tmp_path_factory.mktemp("programs")

    def write(kind: ContractEngine, head: ModelHead) -> Path:
        path = directory / f"{kind.write.__name__}-{head}.graph"
        if not path.exists():
            kind.write(path, head)
        return path

    return write


@pytest.fixture
def open_tiny(
    kind: ContractEngine, written: Written
) -> Iterator[Callable[[ModelHead], EncoderEngine]]:
    """Yield a function that opens the tiny model for a head. Close the engines after the test."""
    with ExitStack() as opened:

        def opener(head: ModelHead) -> EncoderEngine:
            spec = spec_of(kind, written(kind, head), head)
            return opened.enter_context(closing(open_engine(spec, SETTINGS)))

        yield opener
