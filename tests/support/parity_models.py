"""One tiny random checkpoint, run by transformers and by this server."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from build_artifacts.checkpoints.models import LOADERS
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import CPU_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import CPU_FP32, BuildRecipe
from deployments.artifacts.manifest import ArtifactManifest, Gate
from deployments.artifacts.types import TaskName
from deployments.tasks import find_head
from tests.support.in_process import InProcess
from tests.support.tiny_encoders import tiny_checkpoint, write_json

PARITY_MODEL = "tiny/twin"
UNTUNED = BuildBudget(tune_seconds=0)
ParityPrecision = Literal["fp32", "int8"]
# Each recipe has one candidate, so that no search runs. The int8 candidate must pass the default
# accuracy gate.
RECIPES: Mapping[ParityPrecision, BuildRecipe] = {
    "fp32": BuildRecipe(candidates=(CPU_FP32,)),
    "int8": BuildRecipe(candidates=(CPU_INT8,)),
}
# Settings of BERT's tokenizer. Without `model_input_names`, the tokenizer returns no
# token_type_ids.
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    "model_max_length": 512,
    "mask_token": "[MASK]",
    "pad_token": "[PAD]",
}
# Options for responses in the format of transformers' pipelines, without the response cache.
OPTIONS = {"use_cache": False, "legacy_format": True}
LARGEST_LIST = 24  # maximum number of inputs per request of `mixed`


@dataclass(frozen=True)
class ParityModel:
    """A checkpoint and its artifacts."""

    root: Path
    task: TaskName

    @classmethod
    def make(
        cls, root: Path, task: TaskName, *, labels: tuple[str, ...] = (), **tokenizer: Any
    ) -> ParityModel:
        """Write a BERT of two layers and 64 positions with the head of `task`.

        `tokenizer` replaces settings of TOKENIZER; None removes one.
        """
        head = find_head(task)
        checkpoint = tiny_checkpoint(root / "checkpoint", head=head, labels=labels, normalize=False)
        settings = {k: v for k, v in (TOKENIZER | tokenizer).items() if v is not None}
        write_json(checkpoint / "tokenizer_config.json", settings)
        return cls(root, task)

    @property
    def checkpoint(self) -> Path:
        """The directory that transformers loads."""
        return self.root / "checkpoint"

    def model(self) -> Any:
        """Load the torch model with the task's head, in float32 and without fused attention."""
        import transformers

        loader = getattr(transformers, LOADERS[find_head(self.task)])
        model = loader.from_pretrained(
            self.checkpoint, dtype="float32", attn_implementation="eager"
        )
        return model.eval()

    def tokenizer(self) -> Any:
        """Load the tokenizer with transformers."""
        import transformers

        return transformers.AutoTokenizer.from_pretrained(self.checkpoint)

    def pipeline(self, name: str | None = None) -> Any:
        """Create the transformers pipeline `name`, by default the pipeline of the task."""
        import transformers

        return transformers.pipeline(
            name or self.task, model=self.model(), tokenizer=self.tokenizer(), device="cpu"
        )

    def store(self, precision: ParityPrecision = "fp32") -> Path:
        """Build a store with PARITY_MODEL. The only graph of the model has `precision`."""
        store = self.root / precision
        request = BuildRequest(
            ref=str(self.checkpoint),
            store=store,
            id=PARITY_MODEL,
            task=self.task,
            recipe=RECIPES[precision],
            budget=UNTUNED,
        )
        (sealed,) = build(request, BuildProgress(io.StringIO())).manifest.candidates
        assert sealed.precision == precision, "the gate refused the graph that was asked for"
        return store

    @asynccontextmanager
    async def serving(
        self, precision: ParityPrecision = "fp32", *, task: TaskName | None = None
    ) -> AsyncIterator[ServedModel]:
        """Serve PARITY_MODEL within the block. Requests use `task`, by default the model's."""
        app = InProcess(self.store(precision), models=(PARITY_MODEL,))
        async with app.client() as http:
            model = app.pipeline.permitted.find(PARITY_MODEL)
            yield ServedModel(http, task or self.task, model.manifest)


class RefusedError(Exception):
    """The server answered with a status other than 200."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.status_code}: {response.text[:500]}")
        self.status = response.status_code
        self.body = response.json()


@dataclass(frozen=True)
class ServedModel:
    """Client of PARITY_MODEL in an in-process server, for one task."""

    http: httpx.AsyncClient
    task: TaskName
    manifest: ArtifactManifest

    async def ask(self, inputs: Any, parameters: Mapping[str, Any] | None = None) -> Any:
        """Post one request and return the JSON. Raise RefusedError for a status other than 200."""
        body = {"inputs": inputs, "parameters": parameters or {}, "options": OPTIONS}
        response = await self.http.post(f"/models/{PARITY_MODEL}/pipeline/{self.task}", json=body)
        if response.status_code != 200:
            raise RefusedError(response)
        return response.json()

    async def alone(
        self, inputs: Sequence[Any], parameters: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Send one request per input, sequentially. Return the outputs."""
        return [await self.ask(each, parameters) for each in inputs]

    async def mixed(
        self, inputs: Sequence[Any], parameters: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Send concurrent requests with lists of various lengths. Return the outputs in order."""
        requests = (self.ask(part, parameters) for part in split_requests(inputs))
        return [answer for answers in await asyncio.gather(*requests) for answer in answers]


def split_requests(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Split `inputs` into seeded lists of 1 to LARGEST_LIST items."""
    rng = random.Random(len(inputs))
    start = 0
    while start < len(inputs):
        length = rng.randint(1, LARGEST_LIST)
        yield list(inputs[start : start + length])
        start += length


def agreement(ours: Sequence[object], theirs: Sequence[object]) -> float:
    """Return the share of equal values."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(theirs)


def decided(answers: Sequence[Sequence[Mapping[str, Any]]]) -> list[int]:
    """Return the indices of outputs that the accuracy gate does not count as near ties."""
    gap = Gate().near_tie_margin
    return [i for i, best in enumerate(answers) if best[0]["score"] - best[1]["score"] >= gap]
