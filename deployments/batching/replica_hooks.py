"""Types of the functions of an encoder replica that its batch scheduler calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from deployments.engines.base import EncoderEngine
from deployments.messages import ModelRef, TokenizedItem


class LonePass(NamedTuple):
    """Settings of a pass that runs while nothing else runs or waits."""

    engine: EncoderEngine | None = None  # None: the model's usual engine
    is_brief: bool = False  # short enough to run on the event loop


# Plans a pass that runs alone, from its model, number of items and padded tokens per item.
PlanLonePass = Callable[[ModelRef, int, int], LonePass]
# Called with True when a pass of a model starts, and with False when it ends. The model must stay
# loaded in between, even if the callers have gone.
HoldModel = Callable[[ModelRef, bool], None]
# Returns an item that every working engine of the model computes. It contains no input of clients.
GetKnownGood = Callable[[ModelRef], TokenizedItem]
