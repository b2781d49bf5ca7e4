from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from deployments.artifacts.types import Device
from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import (
    EngineFailed,
    HardwareUnavailable,
    InputTooLong,
    InvalidField,
    Overloaded,
    ServeError,
    TooManyItems,
    UnknownModel,
    WrongTask,
    build_overloaded,
)
from deployments.ingress.client_identity import CURRENT_SOURCE, RequestSource
from deployments.ingress.generation_executor import MAX_CALLS_IN_FLIGHT
from deployments.ingress.request_options import RequestOptions
from deployments.keys.caller import Caller, set_current_caller
from deployments.keys.key import KeyLimits
from deployments.keys.limits import KeyMeter
from deployments.messages import BeamSearchParams, GenerationCall, GenerationOptions, ModelRef
from deployments.plan import changes
from deployments.request_headers import ADDRESS_HEADER
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.fakes import FakeClock, wait_until
from tests.support.generation_harness import (
    ASKED,
    GenerationHarness,
    build_request,
    read_chunks,
    seeded,
)
from tests.support.generators import COMPUTE_TYPE, ScriptedGeneratorClient, ScriptedReply


async def test_prompt_without_a_model_uses_the_first_generative_model(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    response = await harness.pipeline.complete(ASKED)
    assert response.model.ref.id == DECODER
    assert [one.text for one in response.completions] == ["Hello"]
    assert response.total_s > 0
    (record,) = harness.recorder.records
    assert (record.model, record.task, record.status) == (DECODER, "text-generation", 200)
    assert (record.compute, record.items) == (COMPUTE_TYPE, 1)
    assert record.timings.tokens == response.timings.tokens == 4 + 3
    assert record.timings.forward_s == pytest.approx(0.005)
    assert record.total_s == response.total_s
    assert harness.is_idle()


async def test_choices_have_consecutive_seeds(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    response = await harness.pipeline.complete(build_request(choices=3, options=seeded(2**64 - 1)))
    assert [one.started.seed for one in response.completions] == [2**64 - 1, 0, 1]


async def test_choices_without_a_seed_send_none(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    await harness.pipeline.complete(build_request(choices=2))
    assert [call.options.sampling.seed for call in harness.generator.calls] == [None, None]


async def test_several_prompts_are_answered_in_order_and_recorded_once(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply((str(call.prompt),)))
    request = build_request(prompt="a", further_prompts=("b", "c"), choices=2)
    response = await harness.pipeline.complete(request)
    assert [one.text for one in response.completions] == ["a", "a", "b", "b", "c", "c"]
    (record,) = harness.recorder.records
    assert record.items == 3
    # Three prompts of one token count once each. Six answers have one token and an end token.
    assert record.timings.tokens == 3 + 6 * 2


async def test_many_calls_of_one_request_do_not_fill_the_queue(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply((str(call.prompt),)))
    prompts = [str(number) for number in range(2 * MAX_CALLS_IN_FLIGHT + 1)]
    request = build_request(prompt=prompts[0], further_prompts=tuple(prompts[1:]))
    response = await harness.pipeline.complete(request)
    assert [one.text for one in response.completions] == prompts
    stream = await harness.pipeline.stream(request)
    assert len([part async for part in read_chunks(stream)]) == 2 * len(prompts)
    assert stream.texts == prompts
    assert harness.generator.most_open == MAX_CALLS_IN_FLIGHT
    assert harness.is_idle()


async def test_best_of_returns_the_most_likely_candidates(writing_store: Path) -> None:
    logprobs = {0: -3.0, 1: -1.0, 2: -2.0}

    def reply_to(call: GenerationCall) -> ScriptedReply:
        seed = call.options.sampling.seed or 0
        return ScriptedReply((f"s{seed}",), logprob=logprobs[seed])

    harness = GenerationHarness(writing_store, reply_to)
    response = await harness.pipeline.complete(
        build_request(choices=2, best_of=3, options=seeded(0))
    )
    assert [one.text for one in response.completions] == ["s1", "s2"]
    assert [one.text for one in response.discarded] == ["s0"]
    assert {call.options.logprobs for call in harness.generator.calls} == {0}


async def test_best_of_does_not_prefer_short_candidates(writing_store: Path) -> None:
    replies = iter(
        (ScriptedReply(("short",), logprob=-0.2), ScriptedReply(("l",) * 9, logprob=-0.1))
    )
    harness = GenerationHarness(writing_store, lambda call: next(replies))
    response = await harness.pipeline.complete(build_request(best_of=2))
    assert [one.text for one in response.completions] == ["l" * 9]


@pytest.mark.parametrize(
    ("fields", "kind", "path"),
    [
        ({"model_id": EMBEDDER}, WrongTask, "model"),
        ({"model_id": "no/such"}, UnknownModel, "model"),
        ({"choices": 9}, InvalidField, "choices"),
        ({"choices": 0}, InvalidField, "choices"),
        ({"best_of": 9}, InvalidField, "best_of"),
        ({"choices": 3, "best_of": 2}, InvalidField, "best_of"),
        ({"further_prompts": ("a",) * 80, "choices": 8}, TooManyItems, "prompt"),
        (
            {"request_options": RequestOptions(require_gpu=True)},
            HardwareUnavailable,
            "options.require_gpu",
        ),
    ],
)
async def test_invalid_generation_requests_are_rejected_and_recorded(
    fields: dict[str, object], kind: type[ServeError], path: str, writing_store: Path
) -> None:
    harness = GenerationHarness(writing_store)
    for ask in (harness.pipeline.complete, harness.pipeline.stream):
        with pytest.raises(kind) as raised:
            await ask(build_request(**fields))
        assert raised.value.field == path
    # A request for a missing model may run again after a build, so it is not recorded yet.
    is_final = kind is not UnknownModel
    assert harness.statuses == [kind.status] * 2 * is_final
    assert harness.generator.calls == []
    assert harness.is_idle()


async def test_wrong_task_error_lists_the_tasks_of_the_model(writing_store: Path) -> None:
    with pytest.raises(WrongTask, match="`feature-extraction`"):
        await GenerationHarness(writing_store).pipeline.complete(build_request(model_id=EMBEDDER))
    with pytest.raises(WrongTask, match="no served model generates text"):
        await GenerationHarness(writing_store, models=(EMBEDDER,)).pipeline.complete(ASKED)


async def test_one_failure_ends_the_other_choices_first(writing_store: Path) -> None:
    def reply_to(call: GenerationCall) -> ScriptedReply:
        if call.options.sampling.seed == 1:
            return ScriptedReply(breaks=EngineFailed("broken"))
        return ScriptedReply(hangs=True)

    harness = GenerationHarness(writing_store, reply_to)
    with pytest.raises(EngineFailed, match="broken"):
        await harness.pipeline.complete(build_request(choices=3, options=seeded(0)))
    assert len(harness.generator.calls) == 3
    assert harness.is_idle()
    assert harness.statuses == [500]


async def test_error_names_the_index_of_the_prompt(writing_store: Path) -> None:
    def reply_to(call: GenerationCall) -> ScriptedReply:
        error = InputTooLong("`prompt` has 9 tokens", field="prompt")
        return ScriptedReply(refusal=error if call.prompt == "long" else None)

    harness = GenerationHarness(writing_store, reply_to)
    many = build_request(prompt="a", further_prompts=("b", "long"))
    for ask in (harness.pipeline.complete, harness.pipeline.stream):
        with pytest.raises(InputTooLong) as raised:
            await ask(many)
        assert raised.value.field == "prompt[2]"
        assert raised.value.message == "`prompt[2]` has 9 tokens"
        with pytest.raises(InputTooLong) as raised:
            await ask(build_request(prompt="long"))
        assert raised.value.field == "prompt"
    assert harness.statuses == [422] * 4


async def test_abandoned_answer_uses_tokens_of_the_key(writing_store: Path) -> None:
    meter = KeyMeter("alice", KeyLimits(tokens_per_minute=6_000), FakeClock())
    set_current_caller(Caller("alice", meter=meter))
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(hangs=True))
    metered = meter.enter(1)
    request = build_request(
        prompt=tuple(range(100)), choices=2, options=GenerationOptions(max_new_tokens=50)
    )
    asking = asyncio.ensure_future(harness.pipeline.complete(request))
    await wait_until(lambda: harness.generator.open == 2)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    metered.release()
    assert (b"x-ratelimit-remaining-tokens", b"200") in meter.enter(1).headers, "with the prompt"


async def test_cancelled_caller_ends_every_choice(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(hangs=True))
    asking = asyncio.ensure_future(harness.pipeline.complete(build_request(choices=4)))
    await wait_until(lambda: harness.generator.open == 4)
    assert harness.pipeline.admission.generations.used == 4
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert harness.is_idle()
    assert harness.statuses == [499]


async def test_full_item_limit_rejects_generation_at_once(writing_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(inflight_generations=6))
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(hangs=True), settings)
    streams = [await harness.pipeline.stream(build_request(choices=n)) for n in (2, 3)]
    with pytest.raises(Overloaded):
        await harness.pipeline.complete(build_request(choices=2))
    for stream in streams:
        await stream.aclose()
    assert harness.is_idle()
    again = await harness.pipeline.stream(build_request(choices=3))
    await again.aclose()
    assert harness.statuses == [429, 499, 499, 499]


async def test_one_client_may_have_half_of_the_generations(writing_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(inflight_generations=4))
    harness = GenerationHarness(writing_store, lambda call: ScriptedReply(hangs=True), settings)
    streams = []
    for address in ("10.0.0.1", "10.0.0.2"):
        CURRENT_SOURCE.set(RequestSource(Headers({ADDRESS_HEADER: address}), 0))
        streams.append(await harness.pipeline.stream(build_request(choices=2)))
        for ask in (harness.pipeline.complete, harness.pipeline.stream):
            with pytest.raises(Overloaded, match="2 completions of this client are in flight"):
                await ask(build_request())
            with pytest.raises(TooManyItems, match="the maximum is 2"):
                await ask(build_request(choices=3))
    CURRENT_SOURCE.set(None)
    for stream in streams:
        await stream.aclose()
    assert harness.is_idle()
    assert not harness.pipeline.admission.generations._used_by


def refuse_long_prompts(call: GenerationCall) -> ScriptedReply:
    """Refuse prompts of more than 10 characters, predicted to take 1,000 s. Hang on others."""
    if len(str(call.prompt)) > 10:
        return ScriptedReply(refusal=build_overloaded("full", 5.0, needed_s=1_000.0))
    return ScriptedReply(hangs=True)


async def test_refusal_of_a_replica_is_repeated_without_asking(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, refuse_long_prompts)
    running = await harness.pipeline.stream(build_request(prompt="first"))
    for prompt in ("long enough", "longer than that"):
        with pytest.raises(Overloaded):
            await harness.pipeline.complete(build_request(prompt=prompt))
    with pytest.raises(Overloaded):
        await harness.pipeline.stream(build_request(prompt="longest of them all"))
    assert [call.prompt for call in harness.generator.calls] == ["first", "long enough"]
    other = build_request(prompt="long enough", options=GenerationOptions(max_new_tokens=1))
    with pytest.raises(Overloaded):
        await harness.pipeline.complete(other)
    assert len(harness.generator.calls) == 3
    await running.aclose()


async def test_refusal_of_a_beam_search_or_of_token_ids_applies_only_to_its_like(
    writing_store: Path,
) -> None:
    def refuse_large_calls(call: GenerationCall) -> ScriptedReply:
        if call.options.beam_search is not None or isinstance(call.prompt, tuple):
            return refuse_long_prompts(call)
        return ScriptedReply(hangs=call.prompt == "first")

    harness = GenerationHarness(writing_store, refuse_large_calls)
    running = await harness.pipeline.stream(build_request(prompt="first"))
    text = "a prompt of 33 characters for once"
    beams = GenerationOptions(beam_search=BeamSearchParams(2))
    for refused in (
        build_request(prompt=text, options=beams),
        build_request(prompt=tuple(range(20))),
    ):
        with pytest.raises(Overloaded):
            await harness.pipeline.complete(refused)
        await harness.pipeline.complete(build_request(prompt=text))
    assert len(harness.generator.calls) == 5, "the replica is asked each time"
    await running.aclose()


async def test_idle_generator_is_asked_after_a_refusal(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store, refuse_long_prompts)
    for _ in range(2):
        with pytest.raises(Overloaded):
            await harness.pipeline.complete(build_request(prompt="long enough"))
    assert len(harness.generator.calls) == 2


async def test_best_of_cannot_be_streamed(writing_store: Path) -> None:
    harness = GenerationHarness(writing_store)
    with pytest.raises(InvalidField) as raised:
        await harness.pipeline.stream(build_request(best_of=2))
    assert raised.value.field == "best_of"


async def test_immediate_answer_is_recorded_completely(writing_store: Path) -> None:
    class Quick(ScriptedGeneratorClient):
        async def stream(self, call: GenerationCall):  # type: ignore[no-untyped-def]
            for what in [what async for what in super().stream(call)]:
                yield what

    harness = GenerationHarness(writing_store)
    harness.clients[Device.CPU] = Quick()
    stream = await harness.pipeline.stream(ASKED)
    assert len([part async for part in read_chunks(stream)]) == 3
    (record,) = harness.recorder.records
    assert (record.compute, record.timings.tokens) == (COMPUTE_TYPE, 7)


async def test_shadow_generates_answers_again_with_their_seeds_and_the_lowest_priority(
    tmp_path: Path,
) -> None:
    for version in ("000000000001", "000000000002"):
        seal_tiny_decoder(tmp_path, version=version)
    changes.promote(tmp_path, DECODER, "000000000001")
    changes.set_shadow(tmp_path, DECODER, "000000000002", 100)
    harness = GenerationHarness(
        tmp_path,
        lambda call: ScriptedReply(
            pieces=("a", "b" if call.model.version == "000000000001" else "c")
        ),
        models=(DECODER,),
    )
    # This request names a version, so the shadow does not repeat it.
    await harness.pipeline.complete(build_request(model_id=f"{DECODER}@000000000001"))
    response = await harness.pipeline.complete(build_request(choices=2))
    stream = await harness.pipeline.stream(build_request())
    text = "".join([chunk.chunk.text async for chunk in read_chunks(stream)])
    shadows = harness.pipeline.shadows
    shadow = ModelRef(DECODER, "000000000002")
    await wait_until(lambda: shadow in shadows.comparisons and shadows.comparisons[shadow].total)
    assert {one.text for one in response.completions} == {text} == {"ab"}
    mirrored = [call for call in harness.generator.calls if call.model == shadow]
    assert {call.priority for call in mirrored} == {1}
    assert mirrored[0].options.sampling.seed == response.completions[0].started.seed
    assert shadows.comparisons[shadow].differed >= 1
    assert harness.statuses == [200, 200, 200]
