from __future__ import annotations

from deployments.ingress.devices.start_times import ESTIMATED_START_S, StartTimes

NAME = "GpuEncoder"


def test_start_is_expected_to_take_what_the_last_one_took() -> None:
    times = StartTimes()
    assert times.expect_s(NAME) == ESTIMATED_START_S
    for now_s, starting, running in ((10, 1, 0), (11, 1, 0), (17.5, 1, 1), (30, 0, 1), (31, 1, 1)):
        times.note({NAME: starting} if starting else {}, {NAME: running}, now_s)
    assert times.expect_s(NAME) == 7.5, "starts beside a running replica are not measured"
    assert times.expect_s("CpuEncoder") == ESTIMATED_START_S
    for now_s, starting, running in ((40, 1, 0), (44, 0, 1)):
        times.note({NAME: starting} if starting else {}, {NAME: running}, now_s)
    assert times.expect_s(NAME) == 4


def test_start_that_failed_says_nothing() -> None:
    times = StartTimes()
    times.note({NAME: 1}, {}, 1.0)
    times.note({}, {}, 5.0)
    times.note({}, {NAME: 1}, 90.0)
    assert times.expect_s(NAME) == ESTIMATED_START_S
