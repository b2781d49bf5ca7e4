from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.artifacts.types import Device
from deployments.ingress.devices.placement import (
    DeviceForecast,
    choose_forecast,
    choose_other_forecast,
)

CPU, GPU = Device.CPU, Device.GPU
# The product of a subnormal number and a power of two is not always exact.
SECONDS = st.floats(0, 1e4, allow_subnormal=False)
FORECASTS = st.lists(
    st.builds(
        DeviceForecast,
        device=st.sampled_from(Device),
        queue_s=SECONDS,
        load_s=SECONDS,
        run_s=SECONDS,
        work_s=SECONDS,
        price=st.floats(0.01, 100),
    ),
    min_size=1,
    max_size=4,
)

# A busy host must not fail an example, and each run tries the same ones.
settled = settings(deadline=None, derandomize=True)


def forecast(device: Device, *, price: float, **seconds: float) -> DeviceForecast:
    return DeviceForecast(
        device, **{"queue_s": 0, "load_s": 0, "run_s": 0.1, "work_s": 0.1, **seconds}, price=price
    )


@pytest.mark.parametrize(
    ("options", "deadline_s", "expected"),
    [
        # Both answer in time: the cheaper one is chosen.
        ([forecast(CPU, price=1), forecast(GPU, price=10, work_s=0.02, run_s=0.02)], 1, CPU),
        ([forecast(CPU, price=1), forecast(GPU, price=10, work_s=0.002, run_s=0.002)], 1, GPU),
        # The cheaper device has a queue of 3 s.
        ([forecast(CPU, price=1, queue_s=3), forecast(GPU, price=10)], 1, GPU),
        ([forecast(CPU, price=1, queue_s=3), forecast(GPU, price=10)], 5, CPU),
        # The time to load the model makes the GPU too late, or more expensive than the CPU.
        ([forecast(CPU, price=1), forecast(GPU, price=0.1, load_s=20)], 1, CPU),
        ([forecast(CPU, price=1), forecast(GPU, price=0.1, load_s=20)], 60, CPU),
        # The cheaper device computes too long.
        ([forecast(CPU, price=1, run_s=3), forecast(GPU, price=10)], 1, GPU),
        # The cheaper device is fast, but the request uses much of its time, on many cores.
        ([forecast(CPU, price=1, work_s=5), forecast(GPU, price=10, work_s=0.1)], 1, GPU),
        # Neither answers in time: the faster one is chosen.
        ([forecast(CPU, price=1, queue_s=30), forecast(GPU, price=10, load_s=20)], 1, GPU),
        ([forecast(CPU, price=1, queue_s=10), forecast(GPU, price=10, load_s=20)], 1, CPU),
        ([forecast(CPU, price=1)], 0, CPU),
    ],
)
def test_choice(options: Sequence[DeviceForecast], deadline_s: float, expected: Device) -> None:
    assert choose_forecast(options, deadline_s).device is expected


def end_s(one: DeviceForecast) -> float:
    return one.queue_s + one.load_s + one.run_s


def cost(one: DeviceForecast) -> float:
    return one.price * (one.work_s + one.load_s)


@settled
@given(FORECASTS, SECONDS)
def test_no_device_in_time_is_cheaper_and_else_none_is_faster(
    options: list[DeviceForecast], deadline_s: float
) -> None:
    chosen = choose_forecast(options, deadline_s)
    in_time = [one for one in options if end_s(one) <= deadline_s]
    if in_time:
        assert chosen in in_time
        assert cost(chosen) == min(cost(one) for one in in_time)
    else:
        assert end_s(chosen) == min(end_s(one) for one in options)


@settled
@given(FORECASTS, SECONDS, SECONDS)
def test_more_time_costs_no_more_once_a_device_is_in_time(
    options: list[DeviceForecast], deadline_s: float, more_s: float
) -> None:
    chosen, later = (
        choose_forecast(options, deadline_s),
        choose_forecast(options, deadline_s + more_s),
    )
    if end_s(chosen) <= deadline_s:
        assert cost(later) <= cost(chosen)


@settled
@given(FORECASTS, SECONDS)
def test_order_of_the_options_does_not_matter(
    options: list[DeviceForecast], deadline_s: float
) -> None:
    chosen, other = (
        choose_forecast(options, deadline_s),
        choose_forecast(options[::-1], deadline_s),
    )
    assert (cost(chosen), end_s(chosen)) == (cost(other), end_s(other))


@settled
@given(FORECASTS, SECONDS)
def test_a_device_that_is_slower_and_dearer_changes_nothing(
    options: list[DeviceForecast], deadline_s: float
) -> None:
    chosen = choose_forecast(options, deadline_s)
    worse = chosen._replace(queue_s=chosen.queue_s + 1, price=chosen.price * 2)
    assert choose_forecast([*options, worse], deadline_s) == chosen


@settled
@given(FORECASTS, SECONDS, st.sampled_from([0.25, 4.0, 1024.0]))
def test_only_the_ratio_of_prices_matters(
    options: list[DeviceForecast], deadline_s: float, factor: float
) -> None:
    scaled = [one._replace(price=one.price * factor) for one in options]
    chosen, other = choose_forecast(options, deadline_s), choose_forecast(scaled, deadline_s)
    assert other == chosen._replace(price=chosen.price * factor)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([forecast(CPU, price=1), forecast(GPU, price=10)], GPU),
        ([forecast(CPU, price=1), forecast(GPU, price=10, queue_s=2)], None),
        ([forecast(CPU, price=1)], None),
    ],
)
def test_refused_request_goes_to_another_device_that_is_in_time(
    options: Sequence[DeviceForecast], expected: Device | None
) -> None:
    other = choose_other_forecast(options, CPU, 1)
    assert (other and other.device) is expected
