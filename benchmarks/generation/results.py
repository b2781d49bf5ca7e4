"""Results of the generation benchmark: values, tables, ratios and goals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import Table, format_number
from benchmarks.common.statistics import Goal, RoundSummary, summarize, summarize_ratios
from benchmarks.generation.scenarios import (
    RUNNING_INTER_TOKEN_MAX,
    STREAMS,
    ChurnResults,
    LongPromptScenario,
)
from benchmarks.generation.streams import (
    DECODE,
    GENAI,
    IN_PROCESS,
    INTER_TOKEN,
    INTER_TOKEN_MAX,
    INTER_TOKEN_P99,
    NO_DRAFTS,
    OVER_HTTP,
    THROUGHPUT,
    TRANSFORMERS,
    TTFT,
    StreamResult,
)
from benchmarks.generation.structured_output import SchemaResults
from build_artifacts.decoders.generation_report import common_prefix_length

# Mean number of leading tokens that a system with other weights must share with IN_PROCESS.
# Rounding changes a greedy answer from some token on, but rarely the first. Answers to another
# prompt, or of a broken model, hardly share one.
MIN_LEADING_TOKENS = 1.0
_COLUMNS = (DECODE, THROUGHPUT, TTFT, INTER_TOKEN, INTER_TOKEN_P99, INTER_TOKEN_MAX)

Rounds = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class SystemResult:
    """Metrics of a system in a part of the benchmark: at a number of streams, or in a scenario."""

    part: str
    system: str
    metrics: Mapping[str, RoundSummary]  # only metrics that every round measured

    @classmethod
    def summarize(cls, part: str, system: str, rounds: Rounds) -> Self:
        """Summarize the metrics that all `rounds` have. `rounds` must not be empty."""
        names = [name for name in rounds[0] if all(name in values for values in rounds)]
        metrics = {name: summarize([values[name] for values in rounds]) for name in names}
        return cls(part, system, metrics)


@dataclass(frozen=True, slots=True)
class AnswerAgreement:
    """Comparison of the answers of two systems to the same prompts."""

    what: str
    compared: int
    same: int  # number of equal answers, by token ids, or by text if ids are missing
    leading_tokens: float | None  # mean length of the common prefix; None if token ids are missing
    must_be_equal: bool = False  # whether both systems run the same version of the same model

    @classmethod
    def compare(
        cls,
        what: str,
        pairs: Sequence[tuple[StreamResult, StreamResult]],
        *,
        must_be_equal: bool = False,
    ) -> Self:
        """Compare token ids. If some answers have no token ids, compare texts."""
        if all(left.ids and right.ids for left, right in pairs):
            prefixes = [common_prefix_length(left.ids, right.ids) for left, right in pairs]
            same = sum(left.ids == right.ids for left, right in pairs)
            return cls(what, len(pairs), same, sum(prefixes) / len(prefixes), must_be_equal)
        same = sum(left.text == right.text for left, right in pairs)
        return cls(what, len(pairs), same, None, must_be_equal)

    @property
    def is_wrong(self) -> bool:
        """Whether answers differ that must be equal."""
        return self.must_be_equal and self.same < self.compared

    @property
    def is_comparable(self) -> bool:
        """Whether both systems do the same work, so that a ratio of their speeds has a meaning.

        Equal texts without token ids do not show it, unless both run the same version.
        """
        if self.must_be_equal:
            return not self.is_wrong
        return self.leading_tokens is not None and self.leading_tokens >= MIN_LEADING_TOKENS

    @property
    def sentence(self) -> str:
        text = f"{self.what}: {self.same} of {self.compared} answers are equal"
        if self.leading_tokens is None:
            return text
        return f"{text}, {self.leading_tokens:.1f} equal leading tokens on average"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResults:
    """Results of the generation benchmark, as written to the result file."""

    model_id: str
    version: str
    compute_type: str
    threads: int
    prompt_tokens: int  # tokens per prompt in the part `streams`
    new_tokens: int
    streams: tuple[SystemResult, ...]
    scenarios: tuple[SystemResult, ...]
    churn: ChurnResults | None
    structured_output: SchemaResults | None
    batch_invariance: AnswerAgreement | None  # batched and unbatched answers in this process
    answer_agreements: tuple[AnswerAgreement, ...]  # each baseline compared with IN_PROCESS
    notes: tuple[str, ...]  # differences between the systems that limit the comparison
    packages: Mapping[str, str]
    missing: Mapping[str, str]  # system -> reason why it was skipped or dropped
    ratios: Mapping[str, RoundSummary]
    goals: tuple[Goal, ...]


def name_streams(streams: int) -> str:
    return f"{streams} streams" if streams > 1 else "1 stream"


def require_correct(results: GenerationResults) -> None:
    """Raise BenchmarkError if answers are wrong, or if requests run or wait after `churn`.

    The answers of one version must be equal in every batch, with and without drafts, over HTTP,
    and in `churn`. Answers to requests with a schema must be valid.
    """
    invariance = results.batch_invariance
    for agreement in (*([] if invariance is None else [invariance]), *results.answer_agreements):
        if agreement.is_wrong:
            raise BenchmarkError(
                f"the answers are wrong, so the timings are invalid: {agreement.sentence}",
                hint="one version of a model must give the same answers in every batch, with and "
                "without drafts, and over HTTP; see the tests of the generation scheduler",
            )
    churn = results.churn
    if churn is not None and not churn.is_clean:
        raise BenchmarkError(
            f"after churn {churn.still_active} KV slots are in use and {churn.still_waiting} "
            f"requests wait; {churn.different} of {churn.compared} answers are wrong",
            hint="see how the generation scheduler releases KV slots",
        )
    schemas = results.structured_output
    if schemas is not None and schemas.invalid:
        raise BenchmarkError(
            f"{schemas.invalid} of {schemas.requests} answers violate their schema",
            hint="the lines above name the violations; see the tests of the grammar",
        )


def build_tables(results: GenerationResults) -> list[Table]:
    """Build the tables of streams and of scenarios, if they were measured."""
    tables = []
    if results.streams:
        header = ["system", "part", *_COLUMNS, "spread"]
        tables.append(Table("streams", header, [_stream_row(r) for r in results.streams]))
    if results.scenarios:
        header = ["part", "system", "metric", "median", "lowest", "highest"]
        rows = [row for result in results.scenarios for row in _scenario_rows(result)]
        tables.append(Table("scenarios", header, rows))
    return tables


def _stream_row(result: SystemResult) -> list[str]:
    metrics = result.metrics
    values = [format_number(metrics[c].median, 1) if c in metrics else "-" for c in _COLUMNS]
    return [result.system, result.part, *values, f"{metrics[THROUGHPUT].spread:.0%}"]


def _scenario_rows(result: SystemResult) -> list[list[str]]:
    return [
        [
            result.part,
            result.system,
            name,
            *(format_number(value, 1) for value in (metric.median, metric.low, metric.high)),
        ]
        for name, metric in result.metrics.items()
    ]


def describe(results: GenerationResults) -> str:
    """Return the console text: tables, checks, notes and ratios."""
    lines = [
        f"{results.model_id} {results.version} {results.compute_type}, {results.threads} threads, "
        f"prompts of {results.prompt_tokens} tokens, answers of {results.new_tokens}",
        "",
    ]
    for table in build_tables(results):
        lines += [table.text, ""]
    if (churn := results.churn) is not None:
        lines.append(
            f"churn: {churn.requests} requests in {churn.seconds:.1f} s, "
            f"{churn.disconnected} disconnected; {churn.different} of {churn.compared} answers "
            f"wrong, {churn.memory_growth_mb:+.1f} MB"
        )
    if (schemas := results.structured_output) is not None:
        lines += [schemas.sentence, *schemas.faults]
    if results.batch_invariance is not None:
        lines.append(results.batch_invariance.sentence)
    lines += [agreement.sentence for agreement in results.answer_agreements]
    lines += [f"note: {note}" for note in results.notes]
    lines += [f"skipped: {name}: {reason}" for name, reason in results.missing.items()]
    lines += [
        f"{what}: {ratio.median:.3f} (spread {ratio.spread:.0%})"
        for what, ratio in results.ratios.items()
    ]
    return "\n".join([*lines, "", "goals", *(goal.sentence for goal in results.goals)])


ONE_TO_GENAI = f"one stream / {GENAI}"
NO_DRAFTS_TO_GENAI = f"one stream without drafts / {GENAI}"
ONE_TO_TRANSFORMERS = f"one stream / {TRANSFORMERS}"
# With several streams the scheduler does not use speculative decoding. The compared single stream
# therefore runs without it, too.
EIGHT_TO_ONE = "eight streams / one stream without drafts"
EIGHT_TO_GENAI = f"eight streams / {GENAI}'s batch of eight"
SERVED_TO_LOOP = "eight clients over HTTP / eight streams"
MIN_RATIOS: Mapping[str, float] = {
    ONE_TO_GENAI: 0.95,
    ONE_TO_TRANSFORMERS: 4.0,
    EIGHT_TO_ONE: 2.7,
    EIGHT_TO_GENAI: 1.4,
    SERVED_TO_LOOP: 0.8,
}
MAX_INTER_TOKEN_MS = 250.0
MAX_MEMORY_GROWTH_MB = 8.0
SCHEMA_COUNT = 50  # number of schema tasks; all answers must be valid


class RatioTable:
    """Metrics by part and system, and the ratios that the goals compare.

    `incomparable` names systems whose answers do not show that they did the same work. They have
    no ratios.
    """

    def __init__(self, results: Sequence[SystemResult], incomparable: Collection[str] = ()) -> None:
        self._metrics = {(result.part, result.system): result.metrics for result in results}
        self._incomparable = incomparable

    def metric(self, part: str, system: str, name: str) -> RoundSummary | None:
        """Return the summary of a metric; None if it was not measured."""
        return self._metrics.get((part, system), {}).get(name)

    def ratios(self) -> dict[str, RoundSummary]:
        """Divide metrics of the same round, so that changes of the machine's speed cancel."""
        one, eight = name_streams(1), name_streams(STREAMS)
        operands = {
            ONE_TO_GENAI: ((one, IN_PROCESS, DECODE), (one, GENAI, DECODE)),
            ONE_TO_TRANSFORMERS: ((one, IN_PROCESS, DECODE), (one, TRANSFORMERS, DECODE)),
            EIGHT_TO_ONE: ((eight, IN_PROCESS, DECODE), (one, NO_DRAFTS, DECODE)),
            NO_DRAFTS_TO_GENAI: ((one, NO_DRAFTS, DECODE), (one, GENAI, DECODE)),
            EIGHT_TO_GENAI: ((eight, IN_PROCESS, DECODE), (eight, GENAI, DECODE)),
            SERVED_TO_LOOP: ((eight, OVER_HTTP, THROUGHPUT), (eight, IN_PROCESS, THROUGHPUT)),
        }
        ratios = {what: self._divide(*pair) for what, pair in operands.items()}
        return {what: ratio for what, ratio in ratios.items() if ratio is not None}

    def _divide(
        self, over: tuple[str, str, str], under: tuple[str, str, str]
    ) -> RoundSummary | None:
        a, b = self.metric(*over), self.metric(*under)
        if over[1] in self._incomparable or under[1] in self._incomparable:
            return None
        if a is None or b is None or len(a.values) != len(b.values):
            return None
        return summarize_ratios(a, b)


def evaluate_goals(
    table: RatioTable,
    ratios: Mapping[str, RoundSummary],
    churn: ChurnResults | None,
    schemas: SchemaResults | None,
) -> tuple[Goal, ...]:
    """Compare ratios (medians), latencies (worst rounds), memory and valid answers with bounds."""
    goals = [
        Goal.at_least(what, ratios[what].median if what in ratios else None, minimum)
        for what, minimum in MIN_RATIOS.items()
    ]
    for system in (IN_PROCESS, OVER_HTTP):
        gap = table.metric(LongPromptScenario.name, system, RUNNING_INTER_TOKEN_MAX)
        what = f"longest inter-token latency of {system} during the prefill of a long prompt, ms"
        goals.append(Goal.at_most(what, gap.high if gap else None, MAX_INTER_TOKEN_MS))
    growth = churn.memory_growth_mb if churn else None
    goals.append(Goal.at_most("memory growth after churn, MB", growth, MAX_MEMORY_GROWTH_MB))
    valid = schemas.valid if schemas else None
    goals.append(Goal.at_least(f"valid answers to {SCHEMA_COUNT} schemas", valid, SCHEMA_COUNT))
    return tuple(goals)
