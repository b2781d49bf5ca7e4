from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deployments.host.thread_priority import ENGINE_NICE, lower_thread_priority


def read_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def read_nice_of_a_child() -> int:
    found: list[int] = []
    child = threading.Thread(target=lambda: found.append(read_nice()))
    child.start()
    child.join()
    return found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="a nice value belongs to the process there")
def test_thread_and_its_children_yield_to_all_others() -> None:
    before = read_nice()
    expected = max(before, ENGINE_NICE)  # under `nice` the tests themselves have a lower priority
    with ThreadPoolExecutor(1, initializer=lower_thread_priority) as lowered:
        assert lowered.submit(read_nice).result() == expected
        assert lowered.submit(read_nice_of_a_child).result() == expected
    assert read_nice() == before


@pytest.mark.skipif(sys.platform != "linux", reason="a nice value belongs to the process there")
def test_lower_priority_of_a_thread_stays() -> None:
    def lower_twice() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        lower_thread_priority()
        return read_nice()

    with ThreadPoolExecutor(1) as background:
        assert background.submit(lower_twice).result() == 19
