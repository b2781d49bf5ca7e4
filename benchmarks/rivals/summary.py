"""Checks of all stored answers, and the summary of the rounds as results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean

from benchmarks.common.statistics import RoundSummary, summarize
from benchmarks.rivals.answers import check_answers, count_tokens, require_right
from benchmarks.rivals.apis import Api, CompletionApi
from benchmarks.rivals.catalog import RIVALS
from benchmarks.rivals.environments import Environment
from benchmarks.rivals.results import AnswerCheck, LevelName, PairedLevel, RivalResult
from benchmarks.rivals.rounds import Meter, RivalRounds
from benchmarks.rivals.workloads import GENERATION, TextRequest
from deployments.errors import ServeError

Checks = Mapping[bool, AnswerCheck]  # key: whether the answers are completions


def check_ours(rounds: RivalRounds) -> Checks:
    """Check all answers of Hundredfold by API. Raises BenchmarkError for a malformed answer."""
    return {
        isinstance(api, CompletionApi): check_meter(rounds, rounds.ours, api)
        for api in rounds.ours.apis
    }


def summarize_rivals(
    rounds: RivalRounds, environments: Mapping[str, Environment]
) -> tuple[RivalResult, ...]:
    """Check and summarize the rivals. Drop rivals with wrong answers from `rounds`."""
    results = []
    for name, meter in list(rounds.rivals.items()):
        try:
            results.append(_summarize_rival(rounds, meter, environments[name]))
        except ServeError as exc:
            rounds.drop(name, exc.message)
    return tuple(results)


def check_meter(rounds: RivalRounds, meter: Meter, api: Api) -> AnswerCheck:
    """Check the stored answers of one API. Raises BenchmarkError for a malformed answer."""
    is_completion = isinstance(api, CompletionApi)
    answers = [
        answer
        for workload, stored in meter.answers.items()
        if (workload == GENERATION) == is_completion
        for answer in stored
    ]
    return check_answers(api, answers, rounds.references, meter.bounds)


def _summarize_rival(rounds: RivalRounds, meter: Meter, environment: Environment) -> RivalResult:
    rival = RIVALS[meter.name]
    check = check_meter(rounds, meter, rival.api)
    require_right(meter.name, check)
    work_ratio = compare_lengths(rounds.ours, meter)
    return RivalResult(
        name=rival.name,
        title=rival.title,
        package=rival.package,
        version=environment.packages.get(rival.package, "unknown"),
        computes_with=rival.computes_with,
        packages=environment.packages,
        check=check,
        levels=tuple(
            PairedLevel.summarize(level, loads, rounds.pairs[rival.name][level], work_ratio)
            for level, loads in meter.loads.items()
        ),
        skipped=tuple(sorted(meter.skipped, key=_level_order)),
        idle_cores=summarize_if_any(meter.idle_cores),
    )  # fmt: skip


def compare_lengths(ours: Meter, rival: Meter) -> float:
    """Return the ratio ours / rival of the tokens per completion; 1.0 for embeddings.

    Only prompts count that both answered: the faster server reaches more prompts in its window, and
    their completions may be longer or shorter.
    """
    ours_by_prompt, rival_by_prompt = _mean_tokens(ours), _mean_tokens(rival)
    prompts = ours_by_prompt.keys() & rival_by_prompt.keys()
    rival_tokens = sum(rival_by_prompt[prompt] for prompt in prompts)
    if not rival_tokens:
        return 1.0
    return sum(ours_by_prompt[prompt] for prompt in prompts) / rival_tokens


def _mean_tokens(meter: Meter) -> dict[TextRequest, float]:
    """Return the mean number of tokens of the stored completions by prompt."""
    apis = [api for api in meter.apis if isinstance(api, CompletionApi)]
    tokens: defaultdict[TextRequest, list[int]] = defaultdict(list)
    for api in apis:
        for answer in meter.answers.get(GENERATION, ()):
            tokens[answer.request].append(count_tokens(api, answer))
    return {prompt: mean(counts) for prompt, counts in tokens.items()}


def _level_order(level: LevelName) -> tuple[str, int]:
    return level.workload, level.connections


def summarize_if_any(values: Sequence[float]) -> RoundSummary | None:
    return summarize(values) if values else None
