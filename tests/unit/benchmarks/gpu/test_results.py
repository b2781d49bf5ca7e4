from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import RunMetadata, read_table
from benchmarks.gpu.cases import Case, CaseResult, Target
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import GpuResults, build_tables

RUN = RunMetadata(benchmark="gpu", command="test", seed=0)
CASES = [Case(name, lambda _: {}) for name in ("description", "matrix-rate", "bandwidth")]
TIMING = {"mean_ms": 2.0, "deviation_ms": 0.1}


def result(case: str, part: str = "device", **changes: Any) -> CaseResult:
    values = {"state": "passed", "device": "cuda", "seconds": 1.0, **changes}
    return CaseResult(part=part, case=case, **values)


def test_file_continues_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    results = GpuResults(RUN)
    results.add(result("description"))
    results.add(result("matrix-rate", state="failed", reason="CUDA error"))
    results.write(path)
    again = GpuResults.read_or_start(path, RUN)
    assert again.cases == results.cases
    assert again.remaining("device", CASES, "cuda") == ["bandwidth", "matrix-rate"]
    # A GPU result does not count for a dry run on the CPU, and vice versa.
    assert again.remaining("device", CASES, "cpu") == [case.name for case in CASES]


def test_each_case_names_the_commit_that_measured_it(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"

    def run_at(commit: str) -> GpuResults:
        run = replace(RUN, host=replace(RUN.host, commit=commit))
        return GpuResults.read_or_start(path, run)

    first = run_at("aaaa")
    first.add(result("description"))
    first.write(path)
    second = run_at("bbbb")
    second.add(result("bandwidth"))
    second.write(path)
    commits = {case.case: case.commit for case in run_at("cccc").cases.values()}
    assert commits == {"description": "aaaa", "bandwidth": "bbbb"}


def test_other_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"results": []}')
    with pytest.raises(BenchmarkError, match="no result of `bench gpu`"):
        GpuResults.read_or_start(path, RUN)
    with pytest.raises(BenchmarkError, match="cannot write"):
        GpuResults(RUN).write(Path("/proc/none/gpu.json"))


def test_unproven_is_what_no_gpu_decided(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    results = GpuResults(RUN)
    results.add(result("description"))
    results.add(result("matrix-rate", state="blocked", reason="no torch"))
    results.add(result("bandwidth", device="cpu"))
    results.write(path)
    table = read_table(path, "unproven")
    device = dict(zip(table.columns, table.rows[0], strict=True))
    assert device["proven on a GPU"] == "1 of 3"
    assert device["of the rest"] == "1 blocked on cuda, 1 passed on cpu"
    assert device["unproven"] == "matrix-rate, bandwidth"
    suite = dict(zip(table.columns, table.rows[3], strict=True))
    assert (suite["of the rest"], suite["unproven"]) == ("1 never run", "all")


def test_candidate_that_the_compiler_leaves_out_is_listed_and_runs_once() -> None:
    reason = "`gpu-fp16`: graphs of this model family compute in fp32"
    cases = [result("bart/gpu-fp16", "decoder-parity", state="unsupported", reason=reason)]
    tables = {table.name: table for table in build_tables(cases)}
    (row,) = (row for row in tables["unproven"].rows if row[0] == "decoder-parity")
    total = len(PARTS["decoder-parity"].cases(Target(is_cuda=True)))
    assert row[2:4] == (f"0 of {total}", f"1 unsupported on cuda, {total - 1} never run")
    assert tables["parity"].rows[0][1:] == ("unsupported", "-", "-", "-", reason)
    results = GpuResults(RUN)
    results.add(cases[0])
    assert results.remaining("decoder-parity", [Case("bart/gpu-fp16", lambda _: {})], "cuda") == []


def test_dry_streams_count_for_those_of_a_gpu_with_other_numbers() -> None:
    cases = [
        result("1b/gpu-fp16-torch/1", "streams", device="cpu"),
        result("1b/gpu-fp16-torch/2", "streams", device="cpu"),
        result("1b/gpu-fp16-flash/2", "streams", device="cpu", state="blocked", reason="package"),
        result("1b/gpu-fp16-transformers/1", "streams", device="cpu"),
        result("1b/gpu-fp16-transformers/2", "streams", device="cpu", state="failed"),
        result("1b/transformers-static/2", "streams", device="cpu"),
        result("1b/transformers-static/32", "streams", values={"total_tokens_per_s": 90.0}),
    ]
    table = build_tables(cases)[0]
    (row,) = (row for row in table.rows if row[0] == "streams")
    streams = dict(zip(table.columns, row, strict=True))
    total = len(PARTS["streams"].cases(Target(is_cuda=True)))
    assert streams["proven on a GPU"] == f"1 of {total}"
    # A system has four GPU cases (1, 8, 32 and 128 streams), but flash attention has two (1, 32).
    assert streams["of the rest"] == (
        f"7 passed on cpu, 4 failed on cpu, 2 blocked on cpu, {total - 14} never run"
    )
    assert "1b/transformers-static/32" not in streams["unproven"]


def test_tables_hold_the_figures() -> None:
    shape = {"shape": "32x384", "items_per_s": 5000.0, **TIMING}
    large = {**shape, "share_of_matrix_rate": 0.5, "share_of_known": 0.566}
    memory = dict.fromkeys(
        ("weight_file_bytes", "kv_cache_bytes", "open_bytes", "capture_bytes", "left_bytes"), 2e6
    )
    load = {"device": "gpu", "connections": 64, "p50": 2.04, "p99": 9.0}
    embeddings = {**load, "model": "gpu/encoder", "embeddings_per_s": 12_345.0}
    tokens = {**load, "model": "gpu/smollm2", "tokens_per_s": 4_000.0}
    steps = [{"slots": 1, "first_s": 0.5, "next_s": 0.001}]
    cases = [
        result(
            "gpu-fp16", "encoder-latency", values={"shapes": [{**shape, "shape": "1x128"}, shape]}
        ),
        result("gpu-fp16", "bert-large", values={"shapes": [large]}),
        result("throughput", "server", values={"rows": [embeddings, tokens]}),
        result("answers", "server", values={"texts": 32}),
        result("1b/gpu-fp16/32", "streams", values={"total_tokens_per_s": 4000.0, **TIMING}),
        result("1b/transformers-static/1", "streams", values={"total_tokens_per_s": 90.0}),
        result("gpu-fp16-torch", "memory", values={**memory, "steps": steps}),
        result("llama/gpu-int4", "decoder-parity", state="rejected", reason="perplexity"),
    ]
    tables = {table.name: table for table in build_tables(cases)}
    assert tables["latency"].columns == ("engine", "items", "128 tokens", "384 tokens")
    assert tables["latency"].rows == [
        ("gpu-fp16", "1", "2.00 ± 0.10", "-"),
        ("gpu-fp16", "32", "-", "2.00 ± 0.10"),
    ]
    assert tables["server"].rows == [
        ("encoder", "gpu", "64", "12,345", "-", "2.0", "9.0"),
        ("smollm2", "gpu", "64", "-", "4,000", "2.0", "9.0"),
    ]
    assert tables["bert-large"].rows[0][-2:] == ("50.0%", "56.6%")
    assert [row[3] for row in tables["streams"].rows] == ["90", "4,000"]
    assert tables["memory"].rows[0][-1] == "500.0 / 1.0"
    assert tables["parity"].rows[0][1] == "rejected"


def test_dry_run_gives_no_figures() -> None:
    dry = result("llama/gpu-fp16", "decoder-parity", device="cpu")
    assert [table.name for table in build_tables([dry])] == ["unproven"]
