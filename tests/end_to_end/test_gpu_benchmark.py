"""The part `server` of `bench gpu`: a server of its own, whose GPU replicas run on the CPU here."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.cases import Bench, Target, run_case
from benchmarks.gpu.server import server_cases
from tests.support.forked_programs import fork_model_builder


def test_served_answers_are_the_same_alone_and_batched(tmp_path: Path) -> None:
    bench = Bench(Target(is_cuda=False), tmp_path)
    (case,) = server_cases(bench.target)
    with fork_model_builder():
        result = run_case("server", case, bench)
    assert (result.state, result.reason) == ("passed", "")
    assert result.values["batched_cosine_worst"] > 0.9999
    assert result.values["same_answers_batched"] > 0.9
