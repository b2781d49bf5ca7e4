"""The HTTP application with a real tokenizer and real encoders in one process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import httpx

from deployments.artifacts.types import Device
from deployments.config import (
    AppArgs,
    EncoderSettings,
    GeneratorSettings,
    IngressUserConfig,
    ModelSettings,
)
from deployments.deployment_names import ENCODER_DEPLOYMENTS
from deployments.host.idle_cores import IdleCores
from deployments.ingress.builds import StartBuilder
from deployments.ingress.devices.cluster_state import ClusterSnapshot, ReplicaTarget
from deployments.ingress.http.application import HttpApplication
from deployments.ingress.micro_batches import BuildSubmit
from deployments.ingress.replica import IngressReplica, ServeRuntime
from deployments.records import RequestRecord
from deployments.replicas.encoder import EncoderReplica
from deployments.replicas.generator import GeneratorReplica
from deployments.replicas.tokenizer import TokenizerReplica
from deployments.transports.base import (
    Clients,
    EncoderClient,
    GeneratorClient,
    ModelPoolClient,
    TokenizerClient,
)
from tests.support.artifacts import CLASSIFIER, EMBEDDER
from tests.support.fakes import ListRecorder, TokenizeLog, send_unbatched
from tests.support.local_clients import (
    LocalEncoderClient,
    LocalGeneratorClient,
    LocalModelPoolClient,
    LocalTokenizerClient,
)

ONE_OF_EACH = {"Tokenizer": 1, "CpuEncoder": 1, "GpuEncoder": 1, "CpuGenerator": 1}
ENCODERS = {Device.CPU: EncoderSettings(), Device.GPU: EncoderSettings(available="auto")}


async def no_metrics() -> str:
    """Return metrics with one sample. This function is a `Scrape`."""
    return "hundredfold_requests_total 1\n"


def no_idle_cores() -> IdleCores:
    """Return an IdleCores that lets idle cores sleep, whatever this machine is."""
    return IdleCores(driver=Path(os.devnull))


def refuse_to_start(_store: Path, _max_memory_bytes: int) -> NoReturn:
    """Raise OSError. This function is a `StartBuilder` for tests without builds."""
    raise OSError("this test starts no builder")


@dataclass
class InProcess:
    """One ingress with its replicas, configured by the test."""

    store: Path
    models: tuple[str, ...] = (EMBEDDER, CLASSIFIER)
    gpus: float = 0.0  # GPUs of the fake cluster
    running: Mapping[str, int] = field(default_factory=lambda: ONE_OF_EACH)
    targets: Mapping[str, ReplicaTarget] = field(default_factory=dict)
    settings: IngressUserConfig = field(default_factory=IngressUserConfig)
    batched: BuildSubmit = send_unbatched
    encoder: EncoderClient | None = None  # replaces the real replicas
    tokenizer: TokenizerClient | None = None  # replaces the real tokenizer in tokenization routes
    generator: GeneratorClient | None = None  # None: no generator, unless `writes` is set
    writes: GeneratorSettings | None = None  # real CPU generator in place of `generator`
    idle_cores: IdleCores = field(default_factory=no_idle_cores)
    start_builder: StartBuilder = refuse_to_start
    raise_bugs: bool = True  # raise unexpected errors in the test instead of answering 500
    recorder: ListRecorder[RequestRecord] = field(default_factory=ListRecorder)
    lost_spans: list[int] = field(default_factory=list)  # spans of each batch that got lost

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
            stack.push_async_callback(tokenizer.close)
            for encoder in encoders.values():
                stack.push_async_callback(encoder.close)
            pools: dict[str, ModelPoolClient] = {
                ENCODER_DEPLOYMENTS[device]: LocalModelPoolClient({f"{device}-1": encoder})
                for device, encoder in encoders.items()
            }
            generator = self.generator
            if self.writes is not None:
                replica = GeneratorReplica(args, Device.CPU, ListRecorder())
                stack.push_async_callback(replica.close)
                replica.start()
                pools["CpuGenerator"] = LocalModelPoolClient({"generator-1": replica})
                generator = LocalGeneratorClient(replica)
            writing = {} if generator is None else {Device.CPU: self.writes or GeneratorSettings()}
            generators = {} if generator is None else {Device.CPU: generator}
            runtime = ServeRuntime(
                Clients(
                    self.tokenizer or LocalTokenizerClient(tokenizer), clients, generators, pools
                ),
                lambda: ClusterSnapshot(self.running, self.gpus, targets=self.targets),
                self.batched,
                no_metrics,
                self.lost_spans.append,
            )
            self.replica = IngressReplica(
                args.model_copy(update={"generators": writing}),
                runtime,
                self.recorder,
                self.idle_cores,
                self.start_builder,
            )
            self.replica.configure(self.settings)
            self.pipeline = self.replica.pipeline
            await self.pipeline.monitor.refresh()
            yield self.replica.build_app()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with self.application() as app:
            transport = httpx.ASGITransport(app, raise_app_exceptions=self.raise_bugs)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                yield http
