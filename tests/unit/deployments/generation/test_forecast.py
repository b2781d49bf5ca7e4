from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.config import SchedulingSettings
from deployments.deadlines import deadline_after
from deployments.generation.admission import AdmissionQueue
from deployments.generation.forecast import Forecast
from deployments.generation.job import Demand
from deployments.generation.lengths import INITIAL_TOKENS, MAX_ANSWERS, AnswerLengths
from deployments.safety_factor import Prediction


def demand(new_tokens: int = 100, prompt: int = 0, generated: int = 0, minimum: int = 0) -> Demand:
    return Demand(minimum, new_tokens, 1, 0.0, prompt_tokens=prompt, generated_tokens=generated)


def test_expected_length_before_the_first_answer_is_bounded() -> None:
    lengths = AnswerLengths()
    assert lengths.expect_remaining(0, 0, 10_000) == INITIAL_TOKENS
    assert lengths.expect_remaining(0, 0, 50) == 50


def test_expected_length_is_learned_from_finished_answers() -> None:
    lengths = AnswerLengths()
    for _ in range(MAX_ANSWERS):
        lengths.record(40, is_cut=False)
    assert lengths.expect_remaining(0, 0, 1_000) == 40
    assert lengths.expect_remaining(0, 0, 30) == 30
    assert lengths.expect_remaining(25, 0, 1_000) == 15
    assert lengths.expect_remaining(0, 100, 1_000) > 100, "the request has a minimum of 100"
    assert lengths.expect_remaining(50, 0, 1_000) == 50, "longer than all: as many tokens again"


def test_cut_answers_count_as_longer() -> None:
    """Half of the answers have 20 tokens. The token limit cuts the others at 50."""
    lengths = AnswerLengths()
    for number in range(MAX_ANSWERS):
        lengths.record(20 if number % 2 else 50, is_cut=number % 2 == 0)
    assert lengths.expect_remaining(0, 0, 50) == pytest.approx(35)
    assert lengths.expect_remaining(0, 0, 100) == pytest.approx(60)
    assert lengths.expect_remaining(20, 0, 100) == pytest.approx(80)


def test_limits_do_not_bias_the_distribution() -> None:
    """Lengths have a mean of 80 tokens. Random token limits of requests cut some answers."""
    chance = random.Random(1)
    lengths = AnswerLengths()
    for _ in range(MAX_ANSWERS):
        tokens, limit = 1 + int(chance.expovariate(1 / 80)), chance.choice([50, 100, 400])
        lengths.record(min(tokens, limit), is_cut=tokens > limit)
    assert lengths.expect_remaining(0, 0, 400) == pytest.approx(80, rel=0.2)
    assert lengths.find_quantile(0, 400) == pytest.approx(129, rel=0.25)
    assert lengths.find_quantile(0, 100) == 100


@pytest.mark.parametrize(("cut_at", "assumed"), [(16, INITIAL_TOKENS), (300, 600)])
def test_answers_that_were_all_cut_do_not_predict_the_limit(cut_at: int, assumed: int) -> None:
    """If all answers were cut, their full length is unknown: assume as many tokens again.

    The assumed length is at least INITIAL_TOKENS.
    """
    lengths = AnswerLengths()
    for _ in range(MAX_ANSWERS):
        lengths.record(cut_at, is_cut=True)
    assert lengths.find_quantile(0, 4_000) == assumed
    assert lengths.expect_remaining(0, 0, 4_000) == assumed
    assert lengths.find_quantile(0, cut_at) == cut_at
    assert lengths.expect_remaining(0, 0, cut_at) == cut_at


def test_answers_that_end_at_the_limit_that_cuts_others_are_few() -> None:
    lengths = AnswerLengths()
    for number in range(MAX_ANSWERS):
        lengths.record(300, is_cut=number > 0)
    assert lengths.find_quantile(0, 4_000) == 600
    assert lengths.expect_remaining(0, 0, 4_000) == pytest.approx(600, rel=0.01)


def test_few_longer_answers_replace_the_assumption() -> None:
    lengths = AnswerLengths()
    for _ in range(MAX_ANSWERS):
        lengths.record(16, is_cut=True)
    for tokens in (80, 90, 100):
        lengths.record(tokens, is_cut=False)
    assert lengths.find_quantile(0, 4_000) == 100


def measured(slots: int = 2) -> Forecast:
    """Return a forecast from measured steps of 0.1 s per used slot, and 10 ms per prompt token."""
    forecast = Forecast(slots)
    for used in range(1, slots + 1):
        forecast.times.record_step(used, 0.1 * used, 0.0)
    forecast.times.record_prefill(100, 1.0)
    return forecast


def test_nothing_is_predicted_before_the_first_measurement() -> None:
    forecast = Forecast(2)
    assert forecast.predict_end_s(demand(), [demand()], [demand()], 0.1) == 0
    assert forecast.price(demand(50)) > forecast.price(demand(10)) > 0


def test_prediction_of_an_idle_decoder_is_the_job_alone() -> None:
    assert measured().predict_end_s(demand(30, prompt=100), [], [], 0.1) == pytest.approx(1 + 3)


def test_prediction_waits_for_slots_in_order() -> None:
    """Two jobs run, with 10 and 20 steps left. A job of 5 steps waits ahead of the new job."""
    running = [demand(10), demand(30, generated=10)]
    predicted = measured().predict_end_s(demand(20), running, [demand(5)], 0.1)
    # The waiting job runs from step 10 to step 15. Then the new job gets its slot.
    assert predicted == pytest.approx((15 + 20) * 0.2)


def test_prompts_before_a_job_delay_it() -> None:
    running = [demand(10, prompt=50), demand(10)]
    alone = measured().predict_end_s(demand(20), [demand(10), demand(10)], [], 0.1)
    assert measured().predict_end_s(demand(20), running, [], 0.1) == pytest.approx(alone + 0.5)
    long = measured().predict_end_s(demand(20, prompt=100), [demand(10)], [], 0.1)
    # 1 s of prefill in ten chunks of 0.1 s. A step of the running job follows each chunk.
    assert long == pytest.approx(1 + 10 * 0.1 + 20 * 0.2)


def test_service_of_a_job_takes_the_steps_of_the_used_slots() -> None:
    forecast = measured(slots=3)
    assert forecast.predict_service_s(demand(10), used_slots=0) == pytest.approx(10 * 0.1)
    assert forecast.predict_service_s(demand(10), used_slots=1) == pytest.approx(10 * 0.2)
    assert forecast.predict_service_s(demand(10), used_slots=3) == pytest.approx(10 * 0.3)


def test_price_is_the_share_of_the_decoder() -> None:
    assert measured().price(demand(10, prompt=20)) == pytest.approx(20 * 0.01 + 10 * 0.2 / 2)


def test_price_of_several_slots_is_that_of_all_of_them() -> None:
    forecast, one = measured(slots=4), demand(10)
    assert forecast.price(one._replace(slots=4)) == pytest.approx(4 * forecast.price(one))


def test_times_follow_a_host_that_gets_slower_after_long() -> None:
    times = Forecast(1).times
    for step_s, steps in ((0.01, 10_000), (0.02, 500)):
        for _ in range(steps):
            times.record_step(1, step_s, 0.0)
            times.record_prefill(100, 100 * step_s)
    assert times.decode_s(1) == pytest.approx(0.02, rel=0.01)
    assert times.prefill_token_s == pytest.approx(0.02, rel=0.01)


def test_unmeasured_occupancy_uses_the_nearest_measurement() -> None:
    forecast = Forecast(8)
    forecast.times.record_step(3, 0.3, 0.1)
    assert [forecast.times.decode_s(used) for used in (1, 3, 8)] == [0.3, 0.3, 0.3]
    assert forecast.times.step_s(2) == pytest.approx(0.4)


def test_slow_measurement_is_bounded_by_those_over_fewer_slots() -> None:
    times = Forecast(8).times
    times.record_step(8, 60.0, 0.0)
    times.record_step(1, 0.01, 0.0)
    assert times.decode_s(8) == pytest.approx(0.08)
    times.record_step(2, 0.012, 0.0)
    assert times.decode_s(8) == pytest.approx(0.048)


def queue_job(queue: AdmissionQueue, number: int, client: str = "", **options: int) -> None:
    job: Any = SimpleNamespace(
        number=number, demand=demand(**options), client=client, priority=0, slot_count=1
    )
    queue.push(job, Prediction(0.0, 1.0, deadline_after(1.0)), SchedulingSettings())


def test_jobs_queued_before_the_first_measurement_keep_their_turn() -> None:
    """The guessed price of the first job is in seconds, like the later prices from measurements."""
    forecast = Forecast(2)
    queue = AdmissionQueue(forecast, 2)
    queue_job(queue, 0, "first")
    forecast.times.record_step(2, 0.01, 0.0)
    for number in range(1, 10):
        queue_job(queue, number, "second")
    taken = queue.take(1)
    assert taken is not None
    assert taken.number == 0


@pytest.mark.parametrize("is_measured", [False, True])
def test_waiting_jobs_take_the_sum_of_their_prices(*, is_measured: bool) -> None:
    forecast = measured() if is_measured else Forecast(2)
    assert forecast.is_measured == is_measured
    queue = AdmissionQueue(forecast, 2)
    works = ({"new_tokens": 20, "prompt": 100}, {"new_tokens": 40})
    for number, work in enumerate(works):
        queue_job(queue, number, **work)
    expected_s = sum(forecast.price(demand(**work)) for work in works) if is_measured else 0.0
    assert queue.predict_s() == pytest.approx(expected_s)
