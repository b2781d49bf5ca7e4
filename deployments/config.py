"""Settings from serve_config.yaml and from environment variables. Unknown keys are rejected.

`AppArgs` is `args` of the application in serve_config.yaml. The `*UserConfig` types are the
`user_config` of the deployments, which `serve deploy` changes without a restart. The environment
variables name the store, the key file, the API key of a client, and the TLS files of Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.artifacts.store import LATEST_NAME
from deployments.artifacts.types import Device
from deployments.deployment_names import (
    ENCODER_DEPLOYMENTS,
    GENERATOR_DEPLOYMENTS,
    INGRESS,
    TOKENIZER,
)
from deployments.errors import BadSetting
from deployments.health import HANG_TIMEOUT_S
from deployments.host.machine import usable_cores

# Hardware that a request names; `auto` leaves the choice to the server.
Compute: TypeAlias = Literal["auto", "cpu", "gpu"]
STORE_VARIABLE = "HUNDREDFOLD_STORE"
UNNAMED_STORE = "~/.cache/hundredfold/store"  # if neither config nor STORE_VARIABLE names one
KEY_FILE_VARIABLE = "HUNDREDFOLD_KEYS"
CLIENT_KEY_VARIABLE = "HUNDREDFOLD_KEY"  # API key that commands send to a server


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | None) -> Self:
        """Parse settings. Raises BadSetting with the path of each invalid key."""
        try:
            return cls.model_validate({} if raw is None else dict(raw))
        except ValidationError as exc:
            lines = (f"`{'.'.join(map(str, e['loc']))}`: {e['msg']}" for e in exc.errors())
            raise BadSetting(f"{cls.__name__}: " + "; ".join(lines)) from exc


# A name of a model for requests. `@` would make it a version of another one.
ModelName: TypeAlias = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^@\s]+$")]


class ModelSettings(_Settings):
    """One model to serve."""

    id: str
    version: str = LATEST_NAME


DEFAULT_POOL_BYTES = 4 << 30
# Minimum of `gpu_memory` in bytes; no model fits in less. A value between 1 and this minimum is a
# mistyped fraction.
MIN_GPU_MEMORY_BYTES = 1 << 28


class HardwareSettings(_Settings):
    """Engine settings of the replicas on one kind of device; a change restarts them."""

    intra_op_threads: int = Field(1, ge=1)
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    available: Literal["auto", "always"] = "always"
    # Memory limit of a replica's loaded models (graphs and KV caches), in bytes. At the limit a new
    # model replaces the least recently used one. Models that the configuration names or the plan
    # pins stay loaded. None: all that `gpu_memory` permits on a GPU, DEFAULT_POOL_BYTES on CPUs.
    pool_bytes: int | None = Field(None, ge=1)


class EncoderSettings(HardwareSettings):
    """Engine settings of an encoder."""

    concurrent_passes: int = Field(1, ge=1)  # forward passes in parallel
    # For models without measurements for this kind of host. background: measure them while serving,
    # at the lowest priority. off: use the measurements of a similar host or the default candidate.
    tune: Literal["background", "off"] = "background"
    tune_seconds: float = Field(60.0, gt=0)  # measuring time per model and per number of threads
    # Memory limit of second copies of graphs, in bytes; 0: no copies. A copy runs a forward pass
    # on all cores while no other pass runs.
    lone_pass_bytes: int = Field(0, ge=0)

    @field_validator("tune", mode="before")
    @classmethod
    def _undo_yaml(cls, value: object) -> object:
        """Restore `off`: if it has no quotes, YAML parses it as false."""
        return "off" if value is False else value


MIN_STEP_THREADS, MAX_STEP_THREADS = 2, 8


def default_step_threads() -> int:
    """Return the number of engine threads of a CPU generator: half of the cores, within limits.

    Encoders and the ingress use the other half. A decode step mostly reads weights, so the memory
    bandwidth limits how many threads make it faster.
    """
    return min(max(usable_cores() // 2, MIN_STEP_THREADS), MAX_STEP_THREADS)


class GeneratorSettings(HardwareSettings):
    """Engine settings of a generator and the KV cache of each model."""

    # None: default_step_threads of the replica's host. `resolve` replaces None with this number.
    intra_op_threads: int | None = Field(1, ge=1)  # type: ignore[assignment]
    kv_slots: int = Field(8, ge=1)  # requests that generate in parallel
    # Tokens of prompt and answer together. The model's own limit may be lower.
    max_context_tokens: int = Field(4_096, ge=16)
    # Bytes of the KV cache per model and GPU. If too small for kv_slots, fewer slots are allocated.
    kv_cache_bytes: int = Field(2 << 30, ge=1)

    def resolve(self) -> Self:
        """Replace `intra_op_threads: None` by the number for this host. Call it in the replica."""
        if self.intra_op_threads is not None:
            return self
        return self.model_copy(update={"intra_op_threads": default_step_threads()})


class AppArgs(_Settings):
    """The store of models, and the encoders and generators that run them."""

    store: Path | None = None
    models: tuple[ModelSettings, ...] = ()  # loaded at the start of replicas, kept in memory
    encoders: dict[Device, EncoderSettings]
    generators: dict[Device, GeneratorSettings] = {}
    # Memory of a GPU that the models of all replicas on the GPU may use: a fraction up to 1, or
    # bytes. The remainder is for activations, captured graphs and the CUDA context of each replica.
    gpu_memory: float = Field(0.85, gt=0)
    # Seconds after which a running forward pass, decode step or tokenization counts as hanging. Ray
    # Serve then replaces the replica. SLOW_FACTOR in health.py lets large calls run longer.
    hang_timeout_s: float = Field(HANG_TIMEOUT_S, gt=0)
    # Memory limit of a replica's loaded tokenizers, in bytes.
    tokenizer_pool_bytes: int = Field(1 << 30, ge=1)
    # Level of the log of the replicas. Ray Serve's own messages follow `logging_config`.
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    # How deployments call each other. channel: direct connections. handle: Ray Serve handles only.
    transport: Literal["channel", "handle"] = "channel"

    @field_validator("gpu_memory")
    @classmethod
    def _check_unit(cls, value: float) -> float:
        if 1 < value < MIN_GPU_MEMORY_BYTES:
            raise ValueError(
                f"{value:g} is neither a fraction up to 1 nor at least {MIN_GPU_MEMORY_BYTES} bytes"
            )
        return value

    def store_path(self) -> Path:
        return default_store() if self.store is None else expand_home(self.store)


class LimitSettings(_Settings):
    """Limits of one request, and of all requests in flight (`inflight_*`)."""

    body_bytes: int = Field(2_000_000, ge=1)  # limit before and after decompression
    body_timeout_s: float = Field(20.0, gt=0)
    body_bytes_per_s: int = Field(10_000, ge=1)  # minimum average rate after the first 3 s
    items: int = Field(1_024, ge=1)  # text_embeddings and open_inference announce it to clients
    item_chars: int = Field(200_000, ge=1)
    request_chars: int = Field(4_000_000, ge=1)  # over all texts; a text in n pairs counts n times
    inflight_items: int = Field(8_192, ge=1)  # a client may use half
    inflight_body_bytes: int = Field(64_000_000, ge=1)  # a client may use half
    inflight_response_bytes: int = Field(256_000_000, ge=1)  # a client may use half
    inflight_generations: int = Field(512, ge=1)  # a client may use half
    trusted_proxies: int = Field(0, ge=0)  # proxies before HAProxy that extend `x-forwarded-for`
    choices: int = Field(8, ge=1)  # limit of answers per prompt (`n`, `best_of`)

    @model_validator(mode="after")
    def _check_one_request_fits(self) -> Self:
        if self.inflight_body_bytes < self.body_bytes:
            raise ValueError(
                f"`inflight_body_bytes` is {self.inflight_body_bytes}; "
                f"the minimum is `body_bytes`, {self.body_bytes}. Set it to this or more."
            )
        if self.inflight_items < self.items:
            raise ValueError(
                f"`inflight_items` is {self.inflight_items}; "
                f"the minimum is `items`, {self.items}. Set it to this or more."
            )
        return self


class MicroBatchSettings(_Settings):
    """Micro-batches of calls in the ingress (@serve.batch)."""

    max_batch_size: int = Field(32, ge=1)
    batch_wait_timeout_s: float = Field(0.0, ge=0)
    max_concurrent_batches: int = Field(16, ge=1)
    long_call_chars: int = Field(1_000, ge=1)


class CacheSettings(_Settings):
    """The response cache of one ingress replica."""

    max_bytes: int = Field(64 << 20, ge=0)
    ttl_s: float = Field(300.0, gt=0)
    # If true, API keys share this cache and the prefix caches of the generators. The response time
    # then shows a client whether another key has sent the same text.
    shared: bool = False


class CorsSettings(_Settings):
    """Web pages of other origins whose scripts may call the server."""

    origins: tuple[str, ...] = ()  # `https://example.org`; `*`: any; empty: none
    max_age_s: int = Field(600, ge=0)  # seconds that a browser may cache the permission


class BuildSettings(_Settings):
    """Models that are fetched and built while the server runs."""

    # If true, requests may start builds of hub models, and operators may start builds of any
    # source.
    allow_pull: bool = False
    max_queued: int = Field(16, ge=1)  # builds that wait or run
    max_memory_bytes: int = Field(8 << 30, ge=1 << 28)  # memory limit of the builder process
    wait_s: float = Field(80.0, gt=0)  # a request with `wait_for_model` gets 503 after this time


class TracingSettings(_Settings):
    """Spans of requests, sent to a collector over OTLP/HTTP. They need the extra `tracing`."""

    enabled: bool = False
    # URL that gets the spans. None: the SDK reads it from the environment.
    endpoint: HttpUrl | None = None
    service_name: str = Field("hundredfold", min_length=1)
    sample_ratio: float = Field(1.0, ge=0, le=1)  # of requests whose sender names no span
    max_traces_per_s: int = Field(100, ge=1)  # limit of one ingress replica


class PlacementSettings(_Settings):
    """Choice between CPU and GPU for requests that name no hardware, or name `auto`."""

    default: Compute = "cpu"  # for requests that name no hardware
    # Relative cost of one second of a replica, by device.
    prices: dict[Device, Annotated[float, Field(gt=0)]] = {Device.CPU: 1.0, Device.GPU: 10.0}
    # Response time in seconds that `auto` aims for. A deadline of the client replaces it.
    target_s: float = Field(1.0, gt=0)
    generation_target_s: float = Field(20.0, gt=0)

    @field_validator("prices", mode="after")
    @classmethod
    def _require_every_device(cls, prices: dict[Device, float]) -> dict[Device, float]:
        if missing := [device.value for device in Device if device not in prices]:
            raise ValueError(f"a price for `{missing[0]}` is missing")
        return prices


class IngressUserConfig(_Settings):
    """`user_config` of the Ingress."""

    limits: LimitSettings = LimitSettings()
    batching: MicroBatchSettings = MicroBatchSettings()
    cache: CacheSettings = CacheSettings()
    cors: CorsSettings = CorsSettings()
    builds: BuildSettings = BuildSettings()
    placement: PlacementSettings = PlacementSettings()
    tracing: TracingSettings = TracingSettings()
    # Names that requests may use for models: id, `id@version` or `id@alias` by name.
    model_names: dict[ModelName, str] = {}
    timeout_s: float = Field(30.0, gt=0)
    generation_timeout_s: float = Field(120.0, gt=0)  # replaces timeout_s for generation
    cold_start_wait_s: float = Field(25.0, ge=0)
    stream_write_timeout_s: float = Field(30.0, gt=0)  # seconds that a client may read nothing
    stream_buffer_tokens: int = Field(2_048, ge=1)  # limit of the unread tokens of a stream
    keep_cores_awake: bool = True  # during requests, in virtual machines; see idle_cores.py
    key_file: Path | None = None  # None: $HUNDREDFOLD_KEYS; if that is unset, no key is required
    no_auth: bool = False  # True: without keys, the server may listen on more than loopback

    def requires_keys(self, environment: Mapping[str, str] = os.environ) -> bool:
        return self.key_file is not None or bool(environment.get(KEY_FILE_VARIABLE))

    def key_file_path(self, environment: Mapping[str, str] = os.environ) -> Path | None:
        path = self.key_file or environment.get(KEY_FILE_VARIABLE)
        return expand_home(path) if path else None


class TokenizerUserConfig(_Settings):
    """`user_config` of the Tokenizer."""

    cache_bytes: int = Field(16 << 20, ge=0)


class BatchSettings(_Settings):
    """Limits of an encoder's queue, and of the batches that its forward passes take from it."""

    max_batch_tokens: int = Field(2_048, ge=1)  # padded tokens per forward pass
    max_batch_items: int = Field(32, ge=1)
    # Milliseconds of one forward pass that a client's items may fill while several clients send.
    client_pass_ms: float = Field(2.0, gt=0)
    # Fixed cost of one more pass, as the number of padding tokens that take the same time.
    pass_overhead_tokens: int = Field(16, ge=0)
    prefetch_from_items: int = Field(8, ge=1)  # with this many queued items, prefetch a pass
    max_waiting_items: int = Field(4_096, ge=1)  # queue limit; more get Overloaded


class EncoderUserConfig(_Settings):
    """`user_config` of an encoder."""

    batching: BatchSettings = BatchSettings()
    # For the encoder's own tokenizer: an idle encoder tokenizes short calls itself.
    tokenizer: TokenizerUserConfig = TokenizerUserConfig()


# `max_ongoing_requests` of the generators, far above the limit of their own queue
# (`max_waiting_requests`). The queue thus refuses requests before Ray Serve does, with a reason.
GENERATOR_ONGOING_REQUESTS = 100_000
# Cores of the cluster per ingress replica. With short texts, the ingress needs about one core for
# every three cores that run forward passes.
CORES_PER_INGRESS = 4


class SchedulingSettings(_Settings):
    """Scheduling of prefill and decode in a generator."""

    max_prefill_stall_ms: float = Field(100.0, gt=0)  # ms that prefill may delay a decode step
    max_prefill_chunk_tokens: int = Field(256, ge=2)  # upper limit of a chunk
    min_prefill_chunk_tokens: int = Field(16, ge=2)  # lower limit; overrides max_prefill_stall_ms
    max_draft_tokens: int = Field(8, ge=0)  # only while a single request runs; 0: no drafts
    max_waiting_requests: int = Field(100, ge=1)  # queue limit; more get Overloaded


class GeneratorUserConfig(_Settings):
    """`user_config` of a generator."""

    scheduling: SchedulingSettings = SchedulingSettings()


# `user_config` type by deployment.
USER_CONFIGS: Mapping[str, type[_Settings]] = {
    INGRESS: IngressUserConfig,
    TOKENIZER: TokenizerUserConfig,
    **dict.fromkeys(ENCODER_DEPLOYMENTS.values(), EncoderUserConfig),
    **dict.fromkeys(GENERATOR_DEPLOYMENTS.values(), GeneratorUserConfig),
}


def default_store() -> Path:
    """Return $HUNDREDFOLD_STORE, or a directory in the user's cache.

    Raises BadSetting if this user has no home.
    """
    return expand_home(os.environ.get(STORE_VARIABLE) or UNNAMED_STORE)


def expand_home(path: str | Path) -> Path:
    """Replace a leading `~` or `~user`. Raises BadSetting if this user has no home."""
    expanded = os.path.expanduser(path)  # Path.expanduser raises RuntimeError
    if expanded.startswith("~"):
        raise BadSetting(
            f"`{path}` is below the home of a user without one; set $HOME, or name a whole path"
        )
    return Path(expanded)


def client_key() -> str | None:
    """Return $HUNDREDFOLD_KEY, the API key that commands send to a server; None if empty or unset.

    Raises BadSetting if an HTTP header cannot contain the key. The message does not quote the key.
    """
    key = os.environ.get(CLIENT_KEY_VARIABLE, "").strip()  # such as a newline from a file
    if not (key.isascii() and key.isprintable()):
        raise BadSetting(f"${CLIENT_KEY_VARIABLE} has characters that an HTTP header cannot have")
    return key or None


class RayTlsFiles(NamedTuple):
    """PEM files for TLS between the processes of Ray."""

    certificate: str
    key: str
    authority: str


def ray_tls_files() -> RayTlsFiles | None:
    """Return the files that Ray's environment names; None without RAY_USE_TLS."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return RayTlsFiles(*(os.environ[name] for name in names))
