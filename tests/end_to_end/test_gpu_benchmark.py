"""The part `server` of `bench gpu` starts a server, whose GPU replicas run on the CPU here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.cases import Bench, Target
from benchmarks.gpu.server import (
    ENCODER,
    GENERATOR,
    compare_answers,
    measure_throughput,
    serve_models,
)
from tests.support.forked_programs import fork_model_builder


@pytest.mark.usefixtures("store")  # after the builds of its models, which would slow this server
def test_served_answers_are_the_same_alone_and_batched(tmp_path: Path) -> None:
    bench = Bench(Target(is_cuda=False), tmp_path)
    with fork_model_builder(), serve_models(bench, (ENCODER, GENERATOR)) as address:
        answers = compare_answers(address, bench.target.seed)
        throughput = measure_throughput(address, bench.target)
    assert answers["reasons"] == []
    assert answers["batched_cosine_worst"] > 0.9999
    assert answers["same_answers_batched"] > 0.9
    assert throughput["reasons"] == []
    loads = [(row["model"], row["device"], row["connections"]) for row in throughput["rows"]]
    assert loads == [
        *(
            (ENCODER, device, connections)
            for device in ("cpu", "gpu")
            for connections in (1, 64, 256)
        ),
        *((GENERATOR, "gpu", connections) for connections in (1, 32)),
    ]
    for row in throughput["rows"]:
        assert row.get("embeddings_per_s", row.get("tokens_per_s")) > 0
        assert row["p50"] > 0
