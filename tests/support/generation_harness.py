"""Harness of the ingress pipeline for generation, with a scripted generator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from deployments.artifacts.types import Device
from deployments.config import AppArgs, GeneratorSettings, IngressUserConfig, ModelSettings
from deployments.ingress.devices.cluster_state import ClusterSnapshot
from deployments.ingress.generation_stream import ChoiceChunk, GenerationStream
from deployments.ingress.replica import IngressReplica, ServeRuntime
from deployments.ingress.requests import GenerationRequest
from deployments.messages import (
    DecodeRequest,
    GenerationCall,
    GenerationOptions,
    SamplingParams,
    TextTokens,
    TokenizeRequest,
)
from deployments.records import RequestRecord
from deployments.transports.base import Clients, GeneratorClient
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import ListRecorder, send_unbatched
from tests.support.generators import ScriptedGeneratorClient, ScriptedReply
from tests.support.in_process import no_idle_cores, no_metrics

ASKED = GenerationRequest(prompt="Once upon a time")


class UnusedTokenizer:
    """A TokenizerClient that generation never calls."""

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        raise AssertionError("unexpected call")

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        raise AssertionError("unexpected call")


@dataclass
class GenerationHarness:
    """An ingress pipeline with one scripted generator and a recorder of its requests."""

    store: Path
    reply_to: Callable[[GenerationCall], ScriptedReply] = lambda call: ScriptedReply()
    settings: IngressUserConfig = field(default_factory=IngressUserConfig)
    running: int = 1  # generator replicas that the next status refresh finds
    models: tuple[str, ...] = (EMBEDDER, DECODER)
    recorder: ListRecorder[RequestRecord] = field(default_factory=ListRecorder)

    def __post_init__(self) -> None:
        self.generator = ScriptedGeneratorClient(self.reply_to)
        args = AppArgs(
            store=self.store,
            models=tuple(ModelSettings(id=model_id) for model_id in self.models),
            encoders={},
            generators={Device.CPU: GeneratorSettings()},
        )
        self.clients: dict[Device, GeneratorClient] = {Device.CPU: self.generator}
        clients = Clients(UnusedTokenizer(), {}, self.clients, {})
        lost_spans: list[int] = []
        runtime = ServeRuntime(
            clients, self._read_status, send_unbatched, no_metrics, lost_spans.append
        )
        replica = IngressReplica(args, runtime, self.recorder, no_idle_cores())
        replica.configure(self.settings)
        self.pipeline = replica.pipeline
        self.pipeline.monitor.apply(self._read_status())

    def _read_status(self) -> ClusterSnapshot:
        return ClusterSnapshot({"CpuGenerator": self.running})

    def is_idle(self) -> bool:
        """Return whether no stream is open and admission has no reservation."""
        return self.generator.open == 0 and self.pipeline.admission.generations.used == 0

    @property
    def statuses(self) -> list[int]:
        return [record.status for record in self.recorder.records]


def build_request(**fields: object) -> GenerationRequest:
    return GenerationRequest(**{"prompt": "Once upon a time", **fields})  # type: ignore[arg-type]


def seeded(seed: int) -> GenerationOptions:
    return GenerationOptions(sampling=SamplingParams(seed=seed))


async def read_chunks(stream: GenerationStream) -> AsyncIterator[ChoiceChunk]:
    """Yield the chunks of all batches of a stream."""
    async for chunks in stream.batches():
        for chunk in chunks:
            yield chunk
