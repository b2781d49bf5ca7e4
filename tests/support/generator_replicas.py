"""Generator replicas with a tiny model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deployments.artifacts.types import Device
from deployments.config import AppArgs, GeneratorSettings, ModelSettings, SchedulingSettings
from deployments.messages import (
    Completion,
    GenerationCall,
    GenerationOptions,
    Grammar,
    ModelRef,
    Prompt,
    SamplingParams,
)
from deployments.records import StepRecord
from deployments.replicas.generator import GeneratorReplica
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import ListRecorder

REPLY = "Hi you!"
OTHER = Grammar("regex", "(a|b)")
GREEDY = SamplingParams(temperature=0)


def args(store: Path) -> AppArgs:
    return AppArgs(
        store=store,
        models=(ModelSettings(id=DECODER), ModelSettings(id="tiny/speaker")),
        encoders={},
        generators={Device.CPU: GeneratorSettings(kv_slots=2, max_context_tokens=200)},
    )


@asynccontextmanager
async def replica(
    store: Path, rules: SchedulingSettings | None = None
) -> AsyncIterator[GeneratorReplica]:
    steps: ListRecorder[StepRecord] = ListRecorder()
    running = GeneratorReplica(args(store), Device.CPU, steps)
    running.start()
    if rules is not None:
        running.configure(rules)
    try:
        yield running
    finally:
        await running.close()


def call(
    model: ModelRef,
    prompt: Prompt = "Once upon a time",
    *,
    deadline_s: float | None = None,
    **options: object,
) -> GenerationCall:
    chosen = GenerationOptions(**{"sampling": GREEDY, "max_new_tokens": 12} | options)
    return GenerationCall(model, prompt, chosen, deadline_s or time.monotonic() + 60)


async def complete(running: GeneratorReplica, request: GenerationCall) -> Completion:
    outcome = await running.complete(request)
    assert isinstance(outcome, Completion), outcome
    return outcome
