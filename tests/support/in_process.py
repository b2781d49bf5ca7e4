"""The HTTP application with a real tokenizer and real encoders in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from deployments.artifacts.types import Device
from deployments.config import (
    AppArgs,
    EncoderSettings,
    GeneratorSettings,
    IngressUserConfig,
    ModelSettings,
)
from deployments.ingress.app import build_http_app
from deployments.ingress.cluster_state import ClusterMonitor, ClusterSnapshot
from deployments.ingress.encoder_executor import EncoderExecutor
from deployments.ingress.generation_executor import GenerationExecutor
from deployments.ingress.http.application import HttpApplication
from deployments.ingress.http.cors import Cors
from deployments.ingress.http.gate import Gate
from deployments.ingress.pipeline import RequestPipeline
from deployments.ingress.resolver import RequestResolver
from deployments.ingress.routing import MicroBatcher, MicroBatchRouter
from deployments.ingress.tokenization import TokenizationService
from deployments.records import RequestRecord
from deployments.registry import ModelRegistry
from deployments.replicas.encoder import EncoderReplica
from deployments.replicas.generator import GeneratorReplica
from deployments.replicas.tokenizer import TokenizerReplica
from deployments.transports.base import EncoderClient, GeneratorClient, TokenizerClient
from deployments.transports.local import (
    LocalEncoderClient,
    LocalGeneratorClient,
    LocalTokenizerClient,
)
from tests.support.artifacts import CLASSIFIER, EMBEDDER
from tests.support.fakes import ListRecorder, TokenizeLog, send_unbatched

ONE_OF_EACH = {"Tokenizer": 1, "CpuEncoder": 1, "GpuEncoder": 1, "CpuGenerator": 1}
ENCODERS = {Device.CPU: EncoderSettings(), Device.GPU: EncoderSettings(available="auto")}


async def no_metrics() -> str:
    """A `Scrape` with one sample."""
    return "hundredfold_requests_total 1\n"


@dataclass
class InProcess:
    """One ingress with its replicas, configured by the test."""

    store: Path
    models: tuple[str, ...] = (EMBEDDER, CLASSIFIER)
    gpus: float = 0.0  # of the fake cluster
    running: Mapping[str, int] = field(default_factory=lambda: ONE_OF_EACH)
    settings: IngressUserConfig = field(default_factory=IngressUserConfig)
    batched: MicroBatcher = send_unbatched
    encoder: EncoderClient | None = None  # replaces the real replicas
    tokenizer: TokenizerClient | None = None  # replaces the real tokenizer of the inspection routes
    generator: GeneratorClient | None = None  # None: the cluster has no generator
    writes: GeneratorSettings | None = None  # replaces `generator` by a real one on the CPU
    raise_bugs: bool = True  # in the test instead of a 500 response
    recorder: ListRecorder[RequestRecord] = field(default_factory=ListRecorder)

    @asynccontextmanager
    async def application(self) -> AsyncIterator[HttpApplication]:
        """Yield the application; close the replicas at the end."""
        args = AppArgs(
            store=self.store,
            models=tuple(ModelSettings(id=m) for m in self.models),
            encoders=ENCODERS,
            generators={} if self.writes is None else {Device.CPU: self.writes},
        )
        tokenizer = TokenizerReplica(args, TokenizeLog())
        encoders = {device: EncoderReplica(args, device, ListRecorder()) for device in ENCODERS}
        local = {
            device: LocalEncoderClient(tokenizer, encoder) for device, encoder in encoders.items()
        }
        clients = dict.fromkeys(ENCODERS, self.encoder) if self.encoder else local
        async with AsyncExitStack() as stack:
            stack.callback(tokenizer.close)
            for encoder in encoders.values():
                stack.push_async_callback(encoder.close)
            generator = self.generator
            if self.writes is not None:
                replica = GeneratorReplica(args, Device.CPU, ListRecorder())
                stack.push_async_callback(replica.close)
                replica.start()
                generator = LocalGeneratorClient(replica)
            writing = {} if generator is None else {Device.CPU: self.writes or GeneratorSettings()}
            monitor = ClusterMonitor(
                ENCODERS, lambda: ClusterSnapshot(self.running, self.gpus), writing
            )
            router = MicroBatchRouter(clients, self.batched, self.settings.batching)
            generators = {} if generator is None else {Device.CPU: generator}
            self.pipeline = RequestPipeline(
                resolver=RequestResolver(ModelRegistry.of(args), monitor),
                encoders=EncoderExecutor(router, monitor, self.settings),
                generators=GenerationExecutor(generators, monitor, self.settings),
                tokenization=TokenizationService(self.tokenizer or LocalTokenizerClient(tokenizer)),
                recorder=self.recorder,
                settings=self.settings,
            )
            await monitor.refresh()
            yield build_http_app(
                self.pipeline,
                Gate(self.settings.key_file_path(), monitor.count_ingress_replicas),
                Cors(self.settings.cors),
                no_metrics,
            )

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with self.application() as app:
            transport = httpx.ASGITransport(app, raise_app_exceptions=self.raise_bugs)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                yield http
