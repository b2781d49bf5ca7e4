"""Background tuning in rounds: which loaded models of a replica are tuned, and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from deployments.messages import LoadedModel, ModelRef
from deployments.tuning.background import BackgroundTuner, Untuned

log = logging.getLogger("ray.serve.hundredfold")

# Tuning uses a core for one or two minutes. With one model per interval, tuning leaves the core
# free most of the time, however many models are loaded.
INTERVAL_S = 600.0

ListUntuned = Callable[[], Sequence[tuple[LoadedModel, Untuned]]]


def choose_models(loaded: Sequence[LoadedModel]) -> list[ModelRef]:
    """Return all pinned models, then the busiest of the other models that are in regular use.

    A model in regular use has been loaded for at least INTERVAL_S and was used within the last
    INTERVAL_S. A model that gets only a few requests is not worth the tuning: it is evicted soon.
    """
    pinned = [model.ref for model in loaded if model.is_pinned]
    used = [
        model
        for model in loaded
        if not model.is_pinned and model.age_s >= INTERVAL_S > model.idle_s
    ]
    busiest = sorted(used, key=lambda model: model.calls_per_minute)[-1:]
    return pinned + [model.ref for model in busiest]


class TuningRounds:
    """Schedule that submits models to the tuner. A round has at most one unpinned model."""

    def __init__(self, tuner: BackgroundTuner, list_untuned: ListUntuned) -> None:
        self._tuner = tuner
        self._list_untuned = list_untuned
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run a round now, then one every INTERVAL_S. Call this in an event loop."""
        self._submit_some()
        self._running = asyncio.get_running_loop().create_task(self._repeat())

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def submit(self) -> None:
        """Submit the models of one round. Has no effect while the tuner is busy."""
        if not self._tuner.is_idle:  # models of earlier rounds come first
            return
        listed = [
            (model, untuned)
            for model, untuned in self._list_untuned()
            if not self._tuner.has_submitted(model.ref)
        ]
        by_ref = {model.ref: untuned for model, untuned in listed}
        for ref in choose_models([model for model, _ in listed]):
            self._tuner.submit(ref, by_ref[ref])

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._submit_some()

    def _submit_some(self) -> None:
        try:
            self.submit()
        except Exception:  # for example, the store is unavailable for a moment
            log.exception("no models are tuned in this round")
