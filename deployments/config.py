"""Settings: read once, frozen, unknown keys refused with the path of the key.

`AppArgs` is `args` of the application in serve_config.yaml; the `*UserConfig` types are the
`user_config` of the deployments, which `serve deploy` changes without a restart. This is the one
module that reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deployments.artifacts.store import LATEST_NAME
from deployments.artifacts.types import Device
from deployments.errors import BadSetting

STORE_VARIABLE = "HUNDREDFOLD_STORE"


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | None) -> Self:
        """The settings in `raw`; raises BadSetting naming the key that is wrong."""
        try:
            return cls.model_validate({} if raw is None else dict(raw))
        except ValidationError as exc:
            lines = (f"`{'.'.join(map(str, e['loc']))}`: {e['msg']}" for e in exc.errors())
            raise BadSetting(f"{cls.__name__}: " + "; ".join(lines)) from exc


class ModelSettings(_Settings):
    """One model to serve."""

    id: str
    version: str = LATEST_NAME


class HardwareSettings(_Settings):
    """What the replicas of one kind of device run on; changing it restarts them."""

    intra_op_threads: int = Field(1, ge=1)
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    available: Literal["auto", "always"] = "always"


class EncoderSettings(HardwareSettings):
    """How an encoder runs its graphs."""

    concurrent_passes: int = Field(1, ge=1)  # forward passes at once
    tune: Literal["background", "off"] = "background"  # models that nobody tuned for this host
    tune_seconds: float = Field(60.0, gt=0)  # for the measuring of one model

    @field_validator("tune", mode="before")
    @classmethod
    def _undo_yaml(cls, value: object) -> object:
        """YAML reads `off` without quotes as false."""
        return "off" if value is False else value


class GeneratorSettings(HardwareSettings):
    """How a generator runs its models, and the memory it sets aside for each."""

    kv_slots: int = Field(8, ge=1)  # requests that are answered at once
    max_context_tokens: int = Field(4_096, ge=16)  # of prompt and answer; the model may read fewer
    # Of keys and values, for each GPU; fewer rows if they are not enough.
    kv_cache_bytes: int = Field(2 << 30, ge=1)


class AppArgs(_Settings):
    """What is served, by which encoders and generators."""

    store: Path | None = None
    models: tuple[ModelSettings, ...] = Field(min_length=1)
    encoders: dict[Device, EncoderSettings]
    generators: dict[Device, GeneratorSettings] = {}

    def store_path(self) -> Path:
        """The artifact store of this process."""
        return default_store() if self.store is None else self.store.expanduser()


class LimitSettings(_Settings):
    """What one request, and all of them together, may ask for."""

    body_bytes: int = Field(2_000_000, ge=1)  # as sent, and once it is inflated
    body_timeout_s: float = Field(20.0, gt=0)
    items: int = Field(1_024, ge=1)
    item_chars: int = Field(200_000, ge=1)
    request_chars: int = Field(4_000_000, ge=1)  # of all texts, as often as they are read
    inflight_items: int = Field(4_096, ge=1)
    inflight_body_bytes: int = Field(64_000_000, ge=1)
    inflight_generations: int = Field(256, ge=1)  # answers being generated
    choices: int = Field(8, ge=1)  # answers generated for one prompt

    @model_validator(mode="after")
    def _leave_room_for_one(self) -> Self:
        if self.inflight_body_bytes < self.body_bytes:
            raise ValueError("`inflight_body_bytes` must be at least `body_bytes`")
        if self.inflight_items < self.items:
            raise ValueError("`inflight_items` must be at least `items`")
        return self


class MicroBatchSettings(_Settings):
    """How the ingress collects calls into lists before the first hop (@serve.batch)."""

    max_batch_size: int = Field(32, ge=1)
    batch_wait_timeout_s: float = Field(0.0, ge=0)
    max_concurrent_batches: int = Field(4, ge=1)
    long_call_chars: int = Field(1_000, ge=1)


class CacheSettings(_Settings):
    """The response cache of one ingress replica."""

    max_bytes: int = Field(64 << 20, ge=0)
    ttl_s: float = Field(300.0, gt=0)


class IngressUserConfig(_Settings):
    """`user_config` of the Ingress."""

    limits: LimitSettings = LimitSettings()
    batching: MicroBatchSettings = MicroBatchSettings()
    cache: CacheSettings = CacheSettings()
    timeout_s: float = Field(30.0, gt=0)
    generation_timeout_s: float = Field(120.0, gt=0)  # in place of it, where text is generated
    cold_start_wait_s: float = Field(25.0, ge=0)
    stream_write_timeout_s: float = Field(
        30.0, gt=0
    )  # a stream's reader who takes nothing so long is gone


class TokenizerUserConfig(_Settings):
    """`user_config` of the Tokenizer."""

    cache_bytes: int = Field(16 << 20, ge=0)


class BatchSettings(_Settings):
    """How an encoder cuts its waiting items into forward passes."""

    max_batch_tokens: int = Field(2_048, ge=1)  # padded tokens per forward pass: the real cost
    max_batch_items: int = Field(32, ge=1)
    pass_overhead_tokens: int = Field(16, ge=0)  # padding that costs as much as one more pass
    prefetch_from_items: int = Field(8, ge=1)  # waiting items from which a pass is made ready ahead
    max_waiting_items: int = Field(4_096, ge=1)  # waiting items; more get Overloaded


class EncoderUserConfig(_Settings):
    """`user_config` of an encoder."""

    batching: BatchSettings = BatchSettings()


class SchedulingSettings(_Settings):
    """How a generator shares its time between prompts and answers."""

    max_prefill_stall_ms: float = Field(
        100.0, gt=0
    )  # that prompts may keep running streams from a token
    max_prefill_chunk_tokens: int = Field(256, ge=2)  # of a prompt, read in one go at most
    min_prefill_chunk_tokens: int = Field(16, ge=2)  # ... and at least, whatever the time
    max_draft_tokens: int = Field(8, ge=0)  # guessed at most for one who is alone; 0: none
    max_waiting_requests: int = Field(100, ge=1)  # waiting for a row; one more gets Overloaded
    max_stream_buffer_tokens: int = Field(
        2_048, ge=1
    )  # that a slow reader may be behind; then it is dropped


class GeneratorUserConfig(_Settings):
    """`user_config` of a generator."""

    scheduling: SchedulingSettings = SchedulingSettings()


# Which type reads the `user_config` of which deployment.
USER_CONFIGS: Mapping[str, type[_Settings]] = {
    "Ingress": IngressUserConfig,
    "Tokenizer": TokenizerUserConfig,
    "CpuEncoder": EncoderUserConfig,
    "GpuEncoder": EncoderUserConfig,
    "CpuGenerator": GeneratorUserConfig,
    "GpuGenerator": GeneratorUserConfig,
}


def default_store() -> Path:
    """$HUNDREDFOLD_STORE, else a directory of the user's cache."""
    named = os.environ.get(STORE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "hundredfold" / "store"
