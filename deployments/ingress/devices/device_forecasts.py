"""Forecasts of how long each device would take for a request.

The first forecasts come from cost tables or a guess. Measured times of answers soon outweigh them.
HAProxy spreads requests evenly over the ingress replicas. The estimate of a device's waiting work
is therefore the unanswered work of this ingress replica times the number of ingress replicas.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from deployments.artifacts.types import Device
from deployments.batching.prices import GUESS_S_PER_TOKEN
from deployments.config import AppArgs, PlacementSettings
from deployments.ingress.devices.cluster_state import (
    ClusterMonitor,
    name_deployment,
)
from deployments.ingress.devices.placement import DeviceForecast
from deployments.load import WorkRate
from deployments.messages import CHARACTERS_PER_TOKEN, CallTimings, Finished, ModelRef
from deployments.registry import RegisteredModel
from deployments.transports.base import ModelPoolClient
from deployments.tuning.costs import TuningTarget, selected_times
from deployments.tuning.host import read_host
from deployments.tuning.selection import nearest_shape
from deployments.tuning.similar_costs import find_nearest_costs

T = TypeVar("T")
K = TypeVar("K")

# Speed of loading a model: 23.8 MB were measured to take 0.17 s. While requests share the cores,
# the same load takes about twice as long.
LOAD_BYTES_PER_S = 140e6
# Tokens (special tokens included) of the text for which the first rates are estimated.
USUAL_TOKENS = 32
# Assumed tokens of an answer until answers of the model have been measured.
USUAL_GENERATED_TOKENS = 128
GUESS_S_PER_GENERATED_TOKEN = 0.02  # seconds per token of one answer
MAX_MODELS = 1_000  # maximum entries of `_rates`, and of `_lengths`


class RequestWork(NamedTuple):
    """The work of a request: the estimated tokens of its texts, or the tokens to generate."""

    model: RegisteredModel
    tokens: float

    @classmethod
    def of_texts(cls, model: RegisteredModel, characters: int, items: int) -> RequestWork:
        return cls(model, characters / CHARACTERS_PER_TOKEN + 2 * items)


class _Rates:
    """Seconds per pass and per token of a model on a device: first estimated, then measured."""

    def __init__(self, pass_s: float, token_s: float) -> None:
        """`pass_s`: seconds of a forward pass. `token_s`: seconds of a replica's time per token.

        Calls that a replica runs at the same time share its time.
        """
        self.passes, self.work = WorkRate(), WorkRate()
        self.passes.record(1, pass_s)
        self.work.record(USUAL_TOKENS, USUAL_TOKENS * token_s)


class DeviceForecasts:
    """Forecasts for the requests of one ingress replica. Use from one event loop."""

    def __init__(
        self, args: AppArgs, monitor: ClusterMonitor, pools: Mapping[str, ModelPoolClient]
    ) -> None:
        """`pools` maps deployment names to ModelPoolClients.

        If a deployment without a ModelPoolClient has a running replica, all models count as loaded
        there. The constructor blocks, because it reads the properties of this host's devices.
        """
        for device in args.encoders:
            read_host(device)  # caches the result: a later query would block the event loop
        self.settings = PlacementSettings()
        self._args = args
        self._monitor = monitor
        self._pools = pools
        self._rates: OrderedDict[tuple[ModelRef, Device], _Rates] = OrderedDict()
        self._lengths: OrderedDict[ModelRef, WorkRate] = OrderedDict()  # mean tokens per answer
        # Unfinished work in seconds of a replica's time, by deployment.
        self._sent_s: dict[str, float] = {}

    def forecast(self, work: RequestWork, device: Device) -> DeviceForecast:
        rates, name = self._find_rates(work.model, device), name_deployment(work.model, device)
        replicas = self._monitor.states_for(work.model)[device].running
        work_s = rates.work.predict_s(work.tokens)
        return DeviceForecast(
            device=device,
            queue_s=self._sent_s.get(name, 0.0)
            * self._monitor.count_ingress_replicas()
            / max(replicas, 1),
            load_s=self._predict_load_s(work.model, device, replicas),
            run_s=rates.passes.predict_s(1) + work_s * self._count_slots(work.model, device),
            work_s=work_s,
            price=self.settings.prices[device],
        )

    def expect_tokens(self, model: RegisteredModel, limit: int | None) -> float:
        """Return the expected tokens of an answer of a generative model, at most `limit`."""
        lengths = self._lengths.get(model.ref)
        usual = USUAL_GENERATED_TOKENS if lengths is None else lengths.predict_s(1)
        return usual if limit is None else min(usual, limit)

    def start(self, work: RequestWork, device: Device) -> Callable[[], None]:
        """Count the work as waiting or running, until the returned function is called.

        A model with fewer than two available devices needs no forecast, so its work is not counted.
        """
        states = self._monitor.states_for(work.model)
        if sum(state.available for state in states.values()) < 2:
            return _do_nothing
        name = name_deployment(work.model, device)
        work_s = self._find_rates(work.model, device).work.predict_s(work.tokens)
        self._sent_s[name] = self._sent_s.get(name, 0.0) + work_s

        def end() -> None:
            self._sent_s[name] -= work_s

        return end

    def record_result(
        self, work: RequestWork, device: Device, items: int, timings: CallTimings
    ) -> None:
        """Update the rates with an encoder's answer to a request of `items` items.

        Do nothing for a model that never needed a forecast, because it has no rates.
        """
        rates = self._rates.get((work.model.ref, device))
        if rates is None:
            return
        passes = items / max(timings.batch_items, 1)  # below 1 if other requests shared the pass
        concurrent = self._args.encoders[device].concurrent_passes
        rates.passes.record(1, timings.forward_s)
        rates.work.record(work.tokens, timings.forward_s * passes / concurrent)

    def record_answers(
        self, model: RegisteredModel, device: Device, answers: Iterable[Finished]
    ) -> None:
        """Update rates and answer lengths with a generator's answers, if the model has rates."""
        rates = self._rates.get((model.ref, device))
        if rates is None:
            return
        lengths = _cache(self._lengths, model.ref, WorkRate)
        for answer in answers:
            run_s = answer.timings.prefill_s + answer.timings.decode_s
            rates.work.record(answer.generated_tokens, run_s / self._count_slots(model, device))
            lengths.record(1, answer.generated_tokens)

    def _count_slots(self, model: RegisteredModel, device: Device) -> int:
        """Return how many requests for the model can share the time of a replica."""
        return self._args.generators[device].kv_slots if model.is_generative else 1

    def _find_rates(self, model: RegisteredModel, device: Device) -> _Rates:
        return _cache(self._rates, (model.ref, device), lambda: self._estimate_rates(model, device))

    def _estimate_rates(self, model: RegisteredModel, device: Device) -> _Rates:
        if model.is_generative:
            token_s = GUESS_S_PER_GENERATED_TOKEN / self._count_slots(model, device)
            return _Rates(0.0, token_s)
        settings = self._args.encoders[device]
        target = TuningTarget(model.directory, model.manifest, device, settings)
        table = find_nearest_costs(target)
        if table is None:
            return _Rates(USUAL_TOKENS * GUESS_S_PER_TOKEN, GUESS_S_PER_TOKEN)
        times_ms = selected_times(table)
        alone = nearest_shape(times_ms, 1, USUAL_TOKENS)
        full = nearest_shape(times_ms, max(shape.items for shape in times_ms), USUAL_TOKENS)
        token_s = times_ms[full] / 1e3 / full.area / settings.concurrent_passes
        return _Rates(times_ms[alone] / 1e3, token_s)

    def _predict_load_s(self, model: RegisteredModel, device: Device, replicas: int) -> float:
        pool = self._pools.get(name_deployment(model, device))
        if replicas and (pool is None or pool.has_model(model.ref)):
            return 0.0
        candidate = model.manifest.candidate_for(device)
        size = 0 if candidate is None else model.manifest.count_bytes(candidate)
        start_s = 0.0 if replicas else self._monitor.expect_start_s(model, device)
        return size / LOAD_BYTES_PER_S + start_s


def _cache(entries: OrderedDict[K, T], key: K, build: Callable[[], T]) -> T:
    """Return the entry of `key`, built if missing. Evict the least recently used at MAX_MODELS."""
    if key not in entries:
        if len(entries) >= MAX_MODELS:
            entries.popitem(last=False)
        entries[key] = build()
    entries.move_to_end(key)
    return entries[key]


def _do_nothing() -> None:
    pass
