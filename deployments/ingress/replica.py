"""Assembly of one ingress replica, and the settings of its parts. It runs without Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from deployments.builds.process import start_builder
from deployments.builds.queue import BuildQueue
from deployments.config import AppArgs, CorsSettings, IngressUserConfig
from deployments.host.idle_cores import IdleCores
from deployments.ingress.apis.shared.context import ApiContext, ModelServices, Scrape
from deployments.ingress.app import build_http_app
from deployments.ingress.builds import BuildService, StartBuilder
from deployments.ingress.devices.cluster_state import ClusterMonitor, ClusterSnapshot
from deployments.ingress.devices.device_choice import DeviceChooser
from deployments.ingress.devices.device_forecasts import DeviceForecasts
from deployments.ingress.encoder_executor import EncoderExecutor
from deployments.ingress.generation_executor import GenerationExecutor
from deployments.ingress.http.application import HttpApplication
from deployments.ingress.http.cors import Cors
from deployments.ingress.http.gate import AccessGate
from deployments.ingress.http.tracing import RequestTracing
from deployments.ingress.micro_batches import BuildSubmit, MicroBatchDispatcher
from deployments.ingress.models.resolver import RequestResolver
from deployments.ingress.pipeline import RequestPipeline
from deployments.ingress.replica_memory import ReplicaMemory
from deployments.ingress.tokenization_service import TokenizationService
from deployments.records import RequestRecorder
from deployments.registry import ModelRegistry
from deployments.transports.base import Clients


class ServeRuntime(NamedTuple):
    """What Ray Serve gives an ingress replica. Tests give it what works in one process."""

    clients: Clients
    read_status: Callable[[], ClusterSnapshot]  # blocks, and runs in a thread
    build_submit: BuildSubmit
    scrape_metrics: Scrape
    record_lost_spans: Callable[[int], None]  # gets the number of spans, in a thread


class IngressReplica:
    """Replica that answers HTTP requests with the replicas of the other deployments.

    It has the default settings until `configure` is called.
    """

    def __init__(
        self,
        args: AppArgs,
        runtime: ServeRuntime,
        recorder: RequestRecorder,
        idle_cores: IdleCores,
        start_builder: StartBuilder = start_builder,
    ) -> None:
        """Raise ArtifactError if a version that `args` requests cannot be used.

        Raises BadSetting if the key file is invalid, PlanUnusable if `plan.json` of the store is.
        """
        clients = runtime.clients
        monitor = ClusterMonitor(args.encoders, runtime.read_status, args.generators)
        self.pipeline = RequestPipeline(
            resolver=RequestResolver(ModelRegistry.of(args)),
            devices=DeviceChooser(monitor, DeviceForecasts(args, monitor, clients.model_pools)),
            encoders=EncoderExecutor(
                MicroBatchDispatcher(clients.encoders, runtime.build_submit), monitor
            ),
            generators=GenerationExecutor(clients.generators, monitor),
            tokenization=TokenizationService(clients.tokenizer),
            recorder=recorder,
        )
        permitted = self.pipeline.permitted
        self._builds = BuildService(BuildQueue(args.store_path()), permitted.serves, start_builder)
        memory = ReplicaMemory(clients.model_pools, permitted)
        self.api_context = ApiContext(
            self.pipeline, runtime.scrape_metrics, ModelServices(self._builds, memory)
        )
        self._gate = AccessGate(count_replicas=monitor.count_ingress_replicas)
        self._cors = Cors(CorsSettings())
        self._tracing = RequestTracing(runtime.record_lost_spans)
        self._idle_cores = idle_cores
        self.configure(IngressUserConfig())

    def configure(self, settings: IngressUserConfig) -> None:
        """Apply new settings to later requests: all of them, or none and raise BadSetting.

        The key file may be invalid, `tracing` may need a missing package or get invalid variables.
        """
        key_ring = self._gate.open_key_ring(settings.key_file_path())
        self._tracing.configure(settings.tracing)
        # What may be refused stands above, so that a refusal leaves all settings as they were.
        self._gate.key_ring = key_ring
        self._cors.settings = settings.cors
        self._builds.settings = settings.builds
        self._idle_cores.is_enabled = settings.keep_cores_awake
        self.pipeline.configure(settings)

    def build_app(self) -> HttpApplication:
        return build_http_app(
            self.api_context, self._gate, self._cors, self._tracing, self._idle_cores
        )
