"""Assembly of the request pipeline from the clients of the other deployments."""

from __future__ import annotations

from deployments.config import AppArgs, IngressUserConfig
from deployments.ingress.devices.cluster_state import ClusterMonitor
from deployments.ingress.devices.device_choice import DeviceChooser
from deployments.ingress.devices.device_forecasts import DeviceForecasts
from deployments.ingress.encoder_executor import EncoderExecutor
from deployments.ingress.generation_executor import GenerationExecutor
from deployments.ingress.micro_batches import BuildSubmit, MicroBatchDispatcher
from deployments.ingress.models.resolver import RequestResolver
from deployments.ingress.pipeline import RequestPipeline
from deployments.ingress.tokenization import TokenizationService
from deployments.records import RequestRecorder
from deployments.registry import ModelRegistry
from deployments.transports.base import Clients


def build_pipeline(
    args: AppArgs,
    clients: Clients,
    monitor: ClusterMonitor,
    build_submit: BuildSubmit,
    recorder: RequestRecorder,
    settings: IngressUserConfig,
) -> RequestPipeline:
    """Build the pipeline of one ingress replica.

    Raises ArtifactError if a version that `args` requests cannot be used. Raises BadSetting if
    `plan.json` of the store is invalid.
    """
    pipeline = RequestPipeline(
        resolver=RequestResolver(ModelRegistry.of(args)),
        devices=DeviceChooser(monitor, DeviceForecasts(args, monitor, clients.model_pools)),
        encoders=EncoderExecutor(
            MicroBatchDispatcher(clients.encoders, build_submit, settings.batching),
            monitor,
            settings,
        ),
        generators=GenerationExecutor(clients.generators, monitor, settings),
        tokenization=TokenizationService(clients.tokenizer),
        recorder=recorder,
    )
    pipeline.configure(settings)
    return pipeline
