"""Report file generation.json of a generative artifact: sample answers and throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from build_artifacts.decoders.measurement import DecoderThroughput
from build_artifacts.types import Tokens
from deployments.artifacts.manifest import GENERATION_NAME, PERPLEXITY, ArtifactManifest, Candidate
from deployments.artifacts.types import FrozenModel
from deployments.errors import ArtifactError
from deployments.terminal.console import format_table

_HEADER = (
    "CANDIDATE",
    "MB",
    "PERPLEXITY",
    "SAME TOKEN",
    "SAME START",
    "BATCHED",
    "1 SLOT",
    "8 SLOTS",
    "PREFILL",
)
_MAX_SHOWN_CHARACTERS = 100  # longer prompts and answers are truncated


class SampleAnswer(FrozenModel):
    """Greedy answer, up to an end token or the length limit."""

    tokens: Tokens
    text: str
    matching_tokens: int  # leading tokens equal to the reference answer


class SampleComparison(FrozenModel):
    """Prompt as the model reads it, with the answers of the reference and all candidates."""

    prompt: str
    reference: SampleAnswer
    candidates: dict[str, SampleAnswer]  # answers by candidate name


class GenerationReport(FrozenModel):
    """Sample answers of the accepted candidates, and their throughput on the build host."""

    host: str
    threads: int
    throughput: dict[str, DecoderThroughput]  # by name, for candidates that the build measured
    samples: tuple[SampleComparison, ...]

    def matching_token_share(self, candidate: str) -> float:
        """Return the share of reference tokens before the first difference, over all samples."""
        matching = sum(s.candidates[candidate].matching_tokens for s in self.samples)
        return matching / max(1, sum(len(s.reference.tokens) for s in self.samples))


def compare_samples(
    tokenizer_file: Path,
    prompts: Sequence[Tokens],
    reference: Sequence[Tokens],
    candidates: Mapping[str, Sequence[Tokens]],
) -> tuple[SampleComparison, ...]:
    """Decode prompts and answers to text and compare the answers with the reference."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def build_answer(tokens: Tokens, expected: Tokens) -> SampleAnswer:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        matching = common_prefix_length(tokens, expected)
        return SampleAnswer(tokens=tokens, text=text, matching_tokens=matching)

    return tuple(
        SampleComparison(
            prompt=tokenizer.decode(list(prompt), skip_special_tokens=False),
            reference=build_answer(reference[i], reference[i]),
            candidates={
                name: build_answer(answers[i], reference[i]) for name, answers in candidates.items()
            },
        )
        for i, prompt in enumerate(prompts)
    )


def common_prefix_length(actual: Tokens, expected: Tokens) -> int:
    pairs = zip(actual, expected, strict=False)
    shorter = min(len(actual), len(expected))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


def read_generation_report(directory: Path) -> GenerationReport:
    """Read generation.json of an artifact. Raises ArtifactError if it is missing or invalid."""
    path = directory / GENERATION_NAME
    try:
        return GenerationReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as exc:
        raise ArtifactError(f"{path}: {str(exc).splitlines()[0]}") from exc


def format_report(manifest: ArtifactManifest, report: GenerationReport) -> str:
    """Format throughput, perplexity and sample answers for a terminal."""
    rows = [_format_row(manifest, report, candidate) for candidate in manifest.candidates]
    blocks = [
        f"{manifest.id} {manifest.version}, tokens per second on {report.host}, "
        f"{report.threads} threads, measured by the build",
        format_table([_HEADER, *rows]),
        f"perplexity of the reference model: {manifest.scores[PERPLEXITY]:.2f}",
        *map(_format_sample, report.samples),
    ]
    return "\n\n".join(blocks)


def _format_row(
    manifest: ArtifactManifest, report: GenerationReport, candidate: Candidate
) -> tuple[str, ...]:
    measured = report.throughput.get(candidate.name)
    speeds = () if measured is None else (measured.single, measured.batched, measured.prefill)
    agreement = candidate.parity.top1_agreement
    return (
        candidate.name,
        f"{manifest.count_bytes(candidate) / 1e6:.1f}",
        f"{candidate.scores[PERPLEXITY]:.2f}",
        "-" if agreement is None else f"{agreement:.1%}",
        f"{report.matching_token_share(candidate.name):.1%}",
        f"{candidate.parity.batched_cosine_worst:.4f}",
        *([f"{speed:.0f}" for speed in speeds] or ["-"] * 3),
    )


def _format_sample(sample: SampleComparison) -> str:
    answers = {"reference": sample.reference, **sample.candidates}
    width = max(len(name) for name in answers)
    lines = [f"{name:<{width}}  {_shorten(answer.text)}" for name, answer in answers.items()]
    return "\n".join([f"> {_shorten(sample.prompt)}", *lines])


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= _MAX_SHOWN_CHARACTERS:
        return line
    return f"{line[:_MAX_SHOWN_CHARACTERS]}…"
