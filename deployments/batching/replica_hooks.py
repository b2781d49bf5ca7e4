"""Functions of an encoder replica that its batch scheduler calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from deployments.batching.prices import EstimateItem
from deployments.engines.base import EncoderEngine
from deployments.messages import ModelRef, TokenizedItem


class LonePass(NamedTuple):
    """Settings of a pass that runs while nothing else runs or waits."""

    engine: EncoderEngine | None = None  # None: the model's usual engine
    is_brief: bool = False  # short enough to run on the event loop
    # Called with the seconds of the forward pass, unless an item failed.
    record: Callable[[float], None] = lambda _forward_s: None


USUAL_PASS = LonePass()


class ReplicaHooks(NamedTuple):
    """Functions that a replica gives its scheduler."""

    # Plans a pass that runs alone, from its model, number of items and padded tokens per item.
    plan_lone_pass: Callable[[ModelRef, int, int], LonePass]
    estimate_item: EstimateItem
    # Called when a pass of a model starts and when it ends. The model must stay loaded in between,
    # even if the callers have gone.
    hold_model: Callable[[ModelRef], None]
    release_model: Callable[[ModelRef], None]
    # Returns an item that every working engine of the model computes, without input of clients.
    get_known_good: Callable[[ModelRef], TokenizedItem]
