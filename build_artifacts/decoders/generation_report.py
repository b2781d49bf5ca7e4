"""What a generating artifact says of itself beside its manifest: generation.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from build_artifacts.console import columns
from build_artifacts.decoders.gate_inputs import Tokens
from build_artifacts.decoders.measurement import DecoderThroughput
from deployments.artifacts.manifest import ArtifactManifest, Candidate
from deployments.artifacts.types import FrozenModel
from deployments.errors import ArtifactError

GENERATION_NAME = "generation.json"
PERPLEXITY = "perplexity"  # among the scores of a manifest and of its candidates
_HEADER = (
    "CANDIDATE",
    "MB",
    "PERPLEXITY",
    "SAME CHOICE",
    "SAME START",
    "1 ROW",
    "8 ROWS",
    "IS_PREFILL",
)
_SHOWN = 100  # characters of an answer


class Answer(FrozenModel):
    """The likeliest token each time, up to an end token or the most that were asked for."""

    tokens: Tokens
    text: str
    same_tokens: int  # leading ones that are the original's


class SampleComparison(FrozenModel):
    """A prompt as the model read it, and what came of it."""

    prompt: str
    original: Answer
    candidates: dict[str, Answer]  # by name


class GenerationReport(FrozenModel):
    """How the candidates speak, and how fast on the machine that built them."""

    host: str
    threads: int
    paces: dict[str, DecoderThroughput]  # by the name of the candidate; not all are measured
    conversations: tuple[SampleComparison, ...]

    def matching_token_share(self, candidate: str) -> float:
        """Share of the original's tokens that the candidate said before it first differed."""
        said = sum(c.candidates[candidate].same_tokens for c in self.conversations)
        return said / max(1, sum(len(c.original.tokens) for c in self.conversations))


def compare_samples(
    tokenizer_file: Path,
    prompts: Sequence[Tokens],
    original: Sequence[Tokens],
    candidates: Mapping[str, Sequence[Tokens]],
) -> tuple[SampleComparison, ...]:
    """Prompts and answers as texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def answer(tokens: Tokens, due: Tokens) -> Answer:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        return Answer(tokens=tokens, text=text, same_tokens=common_prefix_length(tokens, due))

    return tuple(
        SampleComparison(
            prompt=tokenizer.decode(list(prompt), skip_special_tokens=False),
            original=answer(original[i], original[i]),
            candidates={name: answer(given[i], original[i]) for name, given in candidates.items()},
        )
        for i, prompt in enumerate(prompts)
    )


def common_prefix_length(given: Tokens, due: Tokens) -> int:
    """With how many equal tokens two answers begin."""
    pairs = zip(given, due, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(given), len(due)))


def read_generation_report(directory: Path) -> GenerationReport:
    """The generation.json of a sealed artifact. Raises ArtifactError."""
    path = directory / GENERATION_NAME
    try:
        return GenerationReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as exc:
        raise ArtifactError(f"{path}: {str(exc).splitlines()[0]}") from exc


def told(manifest: ArtifactManifest, generation: GenerationReport) -> str:
    """All of it for a terminal."""
    rows = [_row(manifest, generation, candidate) for candidate in manifest.candidates]
    blocks = [
        f"{manifest.id} {manifest.version}, tokens per second on {generation.host}, "
        f"{generation.threads} threads, as built",
        columns([_HEADER, *rows]),
        f"perplexity of the original: {manifest.scores[PERPLEXITY]:.2f}",
        *(_dialogue(conversation) for conversation in generation.conversations),
    ]
    return "\n\n".join(blocks)


def _row(
    manifest: ArtifactManifest, generation: GenerationReport, candidate: Candidate
) -> tuple[str, ...]:
    pace = generation.paces.get(candidate.name)
    speeds = () if pace is None else (pace.alone, pace.company, pace.prompt)
    agreement = candidate.parity.top1_agreement
    return (
        candidate.name,
        f"{graph_bytes(manifest, candidate) / 1e6:.1f}",
        f"{candidate.scores[PERPLEXITY]:.2f}",
        "-" if agreement is None else f"{agreement:.1%}",
        f"{generation.matching_token_share(candidate.name):.1%}",
        *([f"{speed:.0f}" for speed in speeds] or ["-"] * 3),
    )


def graph_bytes(manifest: ArtifactManifest, candidate: Candidate) -> int:
    """The size of a candidate's graphs, with the weights that lie beside them."""
    graphs = tuple(graph for graph in (candidate.graph, candidate.encoder) if graph is not None)
    named = (file for name, file in manifest.files.items() if name.startswith(graphs))
    return sum(file.size for file in named)


def _dialogue(conversation: SampleComparison) -> str:
    said = {"original": conversation.original, **conversation.candidates}
    width = max(len(name) for name in said)
    lines = [f"{name:<{width}}  {_short(answer.text)}" for name, answer in said.items()]
    return "\n".join([f"> {_short(conversation.prompt)}", *lines])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
