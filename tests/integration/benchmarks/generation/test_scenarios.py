from __future__ import annotations

import random

import pytest

from benchmarks.generation.scenarios import (
    CACHED_TOKENS,
    COLD_TTFT,
    JOINING_TTFT,
    RUNNING_INTER_TOKEN_MAX,
    WARM_TTFT,
    LongPromptScenario,
    MixedLoadScenario,
    PromptSampler,
    SharedPrefixScenario,
    max_inter_token_s,
)
from tests.support.benchmark_generation import ScriptedText, answer

CONTEXT = 2_048


def sampler(seed: int = 7) -> PromptSampler:
    return PromptSampler(range(1_000), seed)


def test_prompts_have_distinct_starts_and_depend_on_the_seed() -> None:
    prompts = sampler().sample_prompts([16] * 500)
    assert len({prompt[0] for prompt in prompts}) == 500
    assert prompts == sampler().sample_prompts([16] * 500)
    assert prompts != sampler(8).sample_prompts([16] * 500)
    assert [len(prompt) for prompt in sampler().sample_prompts([1, 999, 2_500])] == [1, 999, 2_500]


def test_max_inter_token_time_covers_the_prefill() -> None:
    joined = answer([3.0], submitted_s=1.0)
    # The gap from 0.9 to 2.4 s counts. The gap from 3.1 s starts after the first token of `joined`.
    patient = answer([0.1, 0.9, 2.4, 3.1, 9.0])
    lucky = answer([0.5, 1.1, 2.0, 3.2])
    assert max_inter_token_s([lucky, patient], joined) == pytest.approx(1.5)
    assert max_inter_token_s([lucky], joined) == pytest.approx(1.2)


def test_max_inter_token_time_of_an_ended_stream_is_none() -> None:
    assert max_inter_token_s([answer([0.5, 2.9])], answer([3.0], submitted_s=1.0)) is None


async def test_long_prompt_starts_after_all_first_tokens() -> None:
    scenario = LongPromptScenario(CONTEXT, written_tokens=40)
    requests = scenario.sample(sampler(), random.Random(1))
    generator = ScriptedText()
    results = await scenario.run(generator, requests)
    assert [len(request.prompt) for request in generator.requests] == [16] * 7 + [1_500]
    assert generator.max_concurrent == 8
    assert results[JOINING_TTFT] >= 1.0
    assert 1.0 <= results[RUNNING_INTER_TOKEN_MAX] < 1_000


async def test_mixed_load_uses_eight_clients_and_bounded_lengths() -> None:
    scenario = MixedLoadScenario(CONTEXT)
    requests = scenario.sample(sampler(), random.Random(1))
    assert len(requests) == 16
    assert all(
        16 <= len(request.prompt) <= 512 and 8 <= request.new_tokens <= 128 for request in requests
    )
    assert len({request.new_tokens for request in requests}) > 8
    generator = ScriptedText()
    results = await scenario.run(generator, requests)
    assert generator.max_concurrent == 8
    assert results["tokens_per_s"] > 0


async def test_shared_prefix_requests_share_the_system_prompt() -> None:
    scenario = SharedPrefixScenario(CONTEXT)
    generator = ScriptedText()
    results = await scenario.run(generator, scenario.sample(sampler(), random.Random(1)))
    first, second = (request.prompt for request in generator.requests)
    assert first[:500] == second[:500]
    assert first[500:] != second[500:]
    assert generator.max_concurrent == 1
    assert {COLD_TTFT, WARM_TTFT, CACHED_TOKENS} == set(results)


@pytest.mark.parametrize(
    "scenario", [LongPromptScenario(64), MixedLoadScenario(64), SharedPrefixScenario(64)]
)
def test_scenarios_fit_a_small_context(
    scenario: LongPromptScenario | MixedLoadScenario | SharedPrefixScenario,
) -> None:
    for request in scenario.sample(sampler(), random.Random(1)):
        assert len(request.prompt) + request.new_tokens <= 64
