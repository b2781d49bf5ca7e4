"""Composition root: builds the Ray Serve application from the args of serve_config.yaml.

Ray sees only the deployment classes below, which wrap plain objects. serve_config.yaml sets their
replicas, placement and resources.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import cached_property
from typing import Any, Literal

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.artifacts.types import Device
from deployments.autoscaling import count_cores
from deployments.config import (
    CORES_PER_INGRESS,
    GENERATOR_ONGOING_REQUESTS,
    AppArgs,
    EncoderUserConfig,
    GeneratorUserConfig,
    IngressUserConfig,
    TokenizerUserConfig,
)
from deployments.deployment_names import ENCODER_DEPLOYMENTS, GENERATOR_DEPLOYMENTS, TOKENIZER
from deployments.errors import ServeError
from deployments.host.idle_cores import IdleCores
from deployments.host.python_gc import collect_rarely
from deployments.ingress.apis.operations.metrics_text import SharedScrape, scrape_ray
from deployments.ingress.batch_slots import serve_micro_batches
from deployments.ingress.devices.cluster_state import ClusterSnapshot, read_serve_status
from deployments.ingress.http.application import HttpApplication
from deployments.ingress.http.direct_requests import DirectRequests
from deployments.ingress.http.server import configure_servers
from deployments.ingress.replica import IngressReplica, ServeRuntime
from deployments.load import LoadMeter
from deployments.messages import (
    CallBatch,
    CallOutcome,
    Chunk,
    Completion,
    DecodeRequest,
    GenerationCall,
    PoolRequest,
    PoolState,
    Started,
    TextTokens,
    TokenizedBatch,
    TokenizeRequest,
)
from deployments.metrics import (
    EncoderMetrics,
    GeneratorMetrics,
    IngressMetrics,
    LoadMetrics,
    TokenizerMetrics,
)
from deployments.records import DeferredRecorder
from deployments.replicas.encoder import EncoderReplica
from deployments.replicas.generator import GeneratorReplica
from deployments.replicas.tokenizer import TokenizerReplica
from deployments.transports.base import Clients
from deployments.transports.channel.deployment_clients import (
    ChannelEncoderClient,
    ChannelGeneratorClient,
    ChannelModelPoolClient,
    ChannelTokenizerClient,
)
from deployments.transports.channel.replica_channel import ReplicaChannel, connect_to_replicas
from deployments.transports.channel.services import (
    ENCODER_SPREAD,
    GENERATOR_SPREAD,
    TOKENIZER_SPREAD,
    HasPool,
    encoder_service,
    generator_service,
    manage_pools,
    tokenizer_service,
)
from deployments.transports.serve import (
    ServeEncoderClient,
    ServeGeneratorClient,
    ServeModelPoolClient,
    ServeTokenizerClient,
    bind_grpc_to_node,
    to_deadline,
    to_deadlines,
    to_remaining,
)


def prepare_replica(args: AppArgs) -> None:
    """Collect garbage rarely, bind gRPC to the node's address only, and set the level of the log.

    The level applies to the messages of this project, whatever level the config sets for Ray Serve.
    """
    collect_rarely()
    bind_grpc_to_node()
    logging.getLogger("ray.serve.hundredfold").setLevel(args.log_level)


class _ChannelHooks:
    """Methods that Ray Serve calls in each deployment with a channel (transports/channel)."""

    _channel: ReplicaChannel
    _replica: LoadMeter
    _metrics: EncoderMetrics | GeneratorMetrics | None = None
    # `manage_pool` applies a request to all of these pools and returns the state of the first.
    _pools: tuple[HasPool, ...]

    async def record_replica_metadata(self) -> dict[str, Any]:
        return await self._channel.start()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        load = self._replica.measure_load(self._channel.backlog)
        self._load_metrics.record(load)
        if load.is_idle and self._metrics is not None:
            self._metrics.record_idle()
        return load.to_metrics()

    async def manage_pool(self, request: PoolRequest) -> tuple[str, PoolState | ServeError]:
        """Apply `request`. Return the replica id, with the models then in memory or with the error.

        Only calls through Ray Serve handles use this method. The server of a channel calls
        `manage_pools` itself.
        """
        replica_id = serve.get_replica_context().replica_id.unique_id
        try:
            return replica_id, await manage_pools(request, *self._pools)
        except ServeError as error:
            return replica_id, error

    @cached_property
    def _load_metrics(self) -> LoadMetrics:
        return LoadMetrics(serve.get_replica_context().deployment)


class Tokenizer(_ChannelHooks):
    """Deployment of TokenizerReplica, which converts texts to token ids and back."""

    _replica: TokenizerReplica

    def __init__(self, args: AppArgs) -> None:
        prepare_replica(args)
        self._replica = TokenizerReplica(args, DeferredRecorder(TokenizerMetrics()))
        self._replica.start()
        self._pools = (self._replica,)
        self._channel = ReplicaChannel(tokenizer_service(self._replica), args.transport)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        self._replica.configure(TokenizerUserConfig.parse(user_config))

    async def tokenize_batch(self, batch: CallBatch) -> TokenizedBatch:
        try:
            return to_remaining(await self._replica.tokenize_batch(to_deadlines(batch)))
        except ServeError as error:
            if not batch.calls:  # an empty batch only loads the model
                raise
            # Ray Serve passes the result directly to the encoder, which returns the result's errors
            # to the ingress, one per call. An exception would fail the encoder's call as a whole.
            return TokenizedBatch(batch.key, b"", (error,) * len(batch.calls), 0.0)

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...] | ServeError:
        return await self._replica.tokenize(request)

    async def decode(self, request: DecodeRequest) -> tuple[str, ...] | ServeError:
        return await self._replica.decode(request)

    async def check_health(self) -> None:
        self._channel.check_health()
        await self._replica.check_health()

    async def __del__(self) -> None:
        await self._channel.close()
        await self._replica.close()


class Encoder(_ChannelHooks):
    """Deployment of EncoderReplica, one per kind of device (CPU, GPU).

    The ingress sends short batches directly to an idle encoder, and all batches if no Tokenizer
    answers. The encoder tokenizes these batches with a TokenizerReplica of its own.
    """

    _replica: EncoderReplica

    def __init__(self, args: AppArgs, device: Device) -> None:
        prepare_replica(args)
        self._metrics = EncoderMetrics()
        self._replica = EncoderReplica(args, device, DeferredRecorder(self._metrics))
        self._replica.start()
        self._tokenizer = TokenizerReplica(
            args, DeferredRecorder(TokenizerMetrics()), generative=False
        )
        self._tokenizer.start()
        self._pools = (self._replica, self._tokenizer)
        service = encoder_service(self._replica, self._tokenizer)
        self._channel = ReplicaChannel(service, args.transport)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        settings = EncoderUserConfig.parse(user_config)
        self._replica.configure(settings.batching)
        self._tokenizer.configure(settings.tokenizer)

    async def infer(self, batch: TokenizedBatch) -> list[CallOutcome]:
        return await self._replica.infer(to_deadlines(batch))

    async def check_health(self) -> None:
        self._channel.check_health()
        await self._tokenizer.check_health()
        await self._replica.check_health()

    async def __del__(self) -> None:
        await self._channel.close()
        await self._tokenizer.close()
        await self._replica.close()


class Generator(_ChannelHooks):
    """Deployment of GeneratorReplica, one per kind of device (CPU, GPU)."""

    _replica: GeneratorReplica

    def __init__(self, args: AppArgs, device: Device) -> None:
        prepare_replica(args)
        self._metrics = GeneratorMetrics()
        self._replica = GeneratorReplica(args, device, DeferredRecorder(self._metrics))
        self._replica.start()
        self._pools = (self._replica,)
        self._channel = ReplicaChannel(generator_service(self._replica), args.transport)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        self._replica.configure(GeneratorUserConfig.parse(user_config).scheduling)

    async def complete(self, call: GenerationCall) -> Completion | ServeError:
        return await self._replica.complete(to_deadline(call))

    async def stream(
        self, call: GenerationCall
    ) -> AsyncGenerator[Started | Chunk | ServeError, None]:
        async with aclosing(self._replica.stream(to_deadline(call))) as stream:
            async for event in stream:
                yield event

    async def tokenize_prompt(self, call: GenerationCall) -> tuple[int, ...] | ServeError:
        return await self._replica.tokenize_prompt(to_deadline(call))

    async def check_health(self) -> None:
        self._channel.check_health()
        await self._replica.check_health()

    async def __del__(self) -> None:
        await self._channel.close()
        await self._replica.close()


def build_clients(
    transport: Literal["channel", "handle"],
    tokenizer: DeploymentHandle,
    encoders: Mapping[Device, DeploymentHandle],
    generators: Mapping[Device, DeploymentHandle],
) -> Clients:
    """Build the clients with which an ingress replica calls the other deployments.

    Call in the event loop of the replica.
    """
    handles = Clients(
        ServeTokenizerClient(tokenizer),
        {device: ServeEncoderClient(tokenizer, handle) for device, handle in encoders.items()},
        {device: ServeGeneratorClient(handle) for device, handle in generators.items()},
        {
            **{ENCODER_DEPLOYMENTS[d]: ServeModelPoolClient(h) for d, h in encoders.items()},
            **{GENERATOR_DEPLOYMENTS[d]: ServeModelPoolClient(h) for d, h in generators.items()},
        },
    )
    if transport == "handle":
        return handles
    spreads = {
        **{ENCODER_DEPLOYMENTS[each]: ENCODER_SPREAD for each in encoders},
        **{GENERATOR_DEPLOYMENTS[each]: GENERATOR_SPREAD for each in generators},
    }
    replicas = {name: connect_to_replicas(name, spread) for name, spread in spreads.items()}
    tokenizers = connect_to_replicas(TOKENIZER, TOKENIZER_SPREAD)
    return Clients(
        ChannelTokenizerClient(tokenizers, handles.tokenizer),
        {
            each: ChannelEncoderClient(tokenizers, replicas[ENCODER_DEPLOYMENTS[each]], fallback)
            for each, fallback in handles.encoders.items()
        },
        {
            each: ChannelGeneratorClient(replicas[GENERATOR_DEPLOYMENTS[each]], fallback)
            for each, fallback in handles.generators.items()
        },
        {name: ChannelModelPoolClient(each) for name, each in replicas.items()},
    )


class Ingress:
    """Deployment of IngressReplica, which answers HTTP requests."""

    def __init__(
        self,
        args: AppArgs,
        tokenizer: DeploymentHandle,
        encoders: dict[Device, DeploymentHandle],
        generators: dict[Device, DeploymentHandle],
    ) -> None:
        prepare_replica(args)
        app_name = serve.get_replica_context().app_name
        metrics = IngressMetrics()

        def read_status() -> ClusterSnapshot:
            snapshot = read_serve_status(app_name)
            metrics.record_replicas(snapshot.running)
            return snapshot

        runtime = ServeRuntime(
            build_clients(args.transport, tokenizer, encoders, generators),
            read_status,
            serve_micro_batches,
            SharedScrape(scrape_ray),
            metrics.record_lost_spans,
        )
        self._replica = IngressReplica(args, runtime, DeferredRecorder(metrics), IdleCores())
        self._transport = args.transport

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        self._replica.configure(IngressUserConfig.parse(user_config))

    def __serve_build_asgi_app__(self) -> HttpApplication:
        """Build the HTTP application; Ray Serve calls this before it starts the HTTP server."""
        app = self._replica.build_app()
        configure_servers(DirectRequests(app) if self._transport == "channel" else None)
        return app


def build_app(args: dict[str, Any]) -> serve.Application:
    """Bind all deployments of serve_config.yaml. Raises BadSetting if `args` are invalid.

    Unless the config sets `num_replicas`, there is one ingress replica per CORES_PER_INGRESS cores,
    and at least one.
    """
    settings = AppArgs.parse(args)
    tokenizer = serve.deployment(Tokenizer).bind(settings)
    encoders = {
        device: serve.deployment(Encoder, name=ENCODER_DEPLOYMENTS[device]).bind(settings, device)
        for device in settings.encoders
    }
    generators = {
        device: serve.deployment(
            Generator,
            name=GENERATOR_DEPLOYMENTS[device],
            max_ongoing_requests=GENERATOR_ONGOING_REQUESTS,
        ).bind(settings, device)
        for device in settings.generators
    }
    ingress = serve.deployment(
        serve.ingress()(Ingress), num_replicas=max(count_cores() // CORES_PER_INGRESS, 1)
    )
    return ingress.bind(settings, tokenizer, encoders, generators)
