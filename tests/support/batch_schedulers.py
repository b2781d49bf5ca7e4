"""Batch schedulers without a replica."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.batching.passes import build_probe_item
from deployments.batching.prices import guess_item_s
from deployments.batching.replica_hooks import USUAL_PASS, ReplicaHooks
from deployments.batching.scheduler import BatchScheduler
from deployments.config import BatchSettings
from deployments.engines.base import EncoderEngine
from deployments.messages import ModelRef
from deployments.records import ForwardPassRecorder

# For models of any kind, which are never unloaded.
DEFAULT_HOOKS = ReplicaHooks(
    plan_lone_pass=lambda *_: USUAL_PASS,
    estimate_item=guess_item_s,
    hold_model=lambda _model: None,
    release_model=lambda _model: None,
    get_known_good=lambda _model: build_probe_item(),
)


def build_batch_scheduler(
    engines: Mapping[ModelRef, EncoderEngine],
    settings: BatchSettings,
    *,
    concurrent_passes: int,
    recorder: ForwardPassRecorder,
    hooks: ReplicaHooks = DEFAULT_HOOKS,
) -> BatchScheduler:
    return BatchScheduler(
        engines, settings, concurrent_passes=concurrent_passes, recorder=recorder, hooks=hooks
    )
