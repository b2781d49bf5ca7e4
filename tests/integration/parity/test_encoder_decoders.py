"""Served encoder-decoders equal `generate` of transformers, greedily and with beams."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from build_artifacts.decoders.graphs.export import export_model
from deployments.artifacts.generation_config import EncoderDecoderConfig, GenerationConfig
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device
from deployments.config import GeneratorSettings, SchedulingSettings
from deployments.engines.decoder import DecoderSpec
from deployments.engines.decoder_factory import open_decoder
from deployments.generation.beam_search import BeamSearchJob
from deployments.generation.job import Job, ModelContext, SamplingJob
from deployments.generation.scheduler import GenerationScheduler
from deployments.generation.step_results import JobEvent
from deployments.health import WorkerHealth
from deployments.messages import BeamSearchParams, Chunk, GenerationOptions, SamplingParams
from tests.support.fakes import TIMEOUT_S, ListRecorder, far_deadline
from tests.support.tiny_checkpoints import (
    ENCODER_DECODERS,
    END,
    VOCABULARY,
    saved,
)

FAMILIES = ("t5", "t5-gated", "bart", "marian", "pegasus", "mbart")
NEW_TOKENS = 14
CONTEXT, SOURCE_TOKENS = 40, 30
SOURCES = [[*np.random.default_rng(n).integers(4, 80, 3 + 4 * n).tolist(), END] for n in range(6)]


class ServedCheckpoint:
    """A tiny checkpoint, loaded in transformers and exported for a scheduler."""

    def __init__(self, family: str, directory: Path) -> None:
        self.model = saved(ENCODER_DECODERS[family], directory / "checkpoint")
        (directory / "graphs").mkdir()
        written = export_model(directory / "checkpoint", directory / "graphs")
        start = self.model.generation_config.decoder_start_token_id
        generation_config = GenerationConfig(
            layers=written.layers,
            kv_heads=written.kv_heads,
            head_dim=written.head_dim,
            eos_token_ids=written.eos_token_ids,
            encoder_decoder=EncoderDecoderConfig(
                max_source_tokens=SOURCE_TOKENS, decoder_start_token_id=start
            ),
        )
        spec = DecoderSpec(
            path=written.decoder,
            encoder=written.encoder,
            device=Device.CPU,
            precision="fp32",
            options=EngineOptions(),
            generation_config=generation_config,
            vocabulary=written.vocabulary,
            max_tokens=CONTEXT,
        )
        decoder = open_decoder(spec, GeneratorSettings(kv_slots=4))
        names = {f"w{n}": n for n in range(VOCABULARY)}
        self._model = ModelContext(
            tokenizer=Tokenizer(WordLevel(names, unk_token="w0")),
            vocabulary=written.vocabulary,
            eos_token_ids=written.eos_token_ids,
            special_tokens=frozenset(written.eos_token_ids),
            context=CONTEXT,
            encoder_decoder=generation_config.encoder_decoder,
        )
        self._news: dict[int, list[Any]] = {}
        self._changed = threading.Condition()
        self.scheduler = GenerationScheduler(
            decoder, SchedulingSettings, self._publish, ListRecorder(), WorkerHealth(family)
        )
        self.scheduler.start()

    def _publish(self, events: Sequence[JobEvent]) -> None:
        with self._changed:
            for event in events:
                self._news.setdefault(event.job, []).append(event.payload)
            self._changed.notify_all()

    def answers(self, beams: Sequence[BeamSearchParams | None]) -> list[list[int]]:
        """Generate tokens for all SOURCES concurrently. `beams` has one entry per source."""
        jobs = [self._job(source, own) for source, own in zip(SOURCES, beams, strict=True)]
        for job in jobs:
            self.scheduler.submit(job)
        with self._changed:
            assert self._changed.wait_for(lambda: all(map(self._is_done, jobs)), TIMEOUT_S)
        return [
            [
                t.id
                for what in self._news[job.number]
                if isinstance(what, Chunk)
                for t in what.tokens
            ]
            for job in jobs
        ]

    def _is_done(self, job: Job) -> bool:
        last = self._news.get(job.number, [None])[-1]
        assert not isinstance(last, Exception), last
        return isinstance(last, Chunk) and last.finished is not None

    def _job(self, source: list[int], beams: BeamSearchParams | None) -> Job:
        options = GenerationOptions(
            sampling=SamplingParams(temperature=0),
            beam_search=beams,
            max_new_tokens=NEW_TOKENS,
            no_repeat_ngram_size=2,  # random weights would repeat the same tokens
        )
        if beams is not None:
            return BeamSearchJob(source, options, beams, self._model, far_deadline())
        return SamplingJob(source, options, self._model, None, far_deadline())

    def expected(self, source: list[int], beams: BeamSearchParams | None) -> list[int]:
        """Return the tokens of transformers' `generate` after the start token, up to END."""
        wanted = beams or BeamSearchParams(1)
        with torch.inference_mode():
            (answer,) = self.model.generate(
                torch.tensor([source]),
                num_beams=wanted.num_beams,
                length_penalty=wanted.length_penalty,
                early_stopping=wanted.early_stopping,
                max_new_tokens=NEW_TOKENS,
                no_repeat_ngram_size=2,
                do_sample=False,
            ).tolist()
        tokens: list[int] = answer[1:]
        return tokens[: tokens.index(END) + 1] if END in tokens else tokens[:NEW_TOKENS]


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedCheckpoint]:
    one = ServedCheckpoint(request.param, tmp_path_factory.mktemp(request.param))
    yield one
    one.scheduler.close()


@pytest.mark.parametrize(
    "beams",
    [
        pytest.param([None] * 6, id="greedy"),
        pytest.param([BeamSearchParams(2)] * 6, id="two beams"),
        pytest.param(
            [BeamSearchParams(4, length_penalty=2.0, early_stopping=True)] * 6, id="four beams"
        ),
        pytest.param(
            [None, BeamSearchParams(3), None, BeamSearchParams(2), None, BeamSearchParams(3)],
            id="side by side",
        ),
    ],
)
def test_outputs_equal_generate(
    served: ServedCheckpoint, beams: list[BeamSearchParams | None]
) -> None:
    expected = [served.expected(source, own) for source, own in zip(SOURCES, beams, strict=True)]
    assert served.answers(beams) == expected
    assert len({tuple(tokens) for tokens in expected}) > 1, "all answers alike: nothing is shown"
