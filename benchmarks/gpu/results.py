"""Result file of the GPU benchmark: cases by part, tables, and the list of unproven cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import RunMetadata, Table, encode_result, format_number
from benchmarks.gpu.cases import Case, CaseResult, State, Target
from benchmarks.gpu.parts import PARTS
from deployments.files import write_atomically


@dataclass(slots=True)
class GpuResults:
    """Results of all runs that wrote one file. A later result of a case replaces an earlier one."""

    run: RunMetadata
    cases: dict[tuple[str, str], CaseResult] = field(default_factory=dict)

    def add(self, result: CaseResult) -> None:
        """Add a result of this run. Record the commit of the run in the result."""
        self._insert(replace(result, commit=self.run.host.commit))

    def _insert(self, result: CaseResult) -> None:
        self.cases[result.part, result.case] = result

    def find(self, part: str, case: str, device: str) -> CaseResult | None:
        """Return the result of a case, or None if its last run was not on `device`."""
        result = self.cases.get((part, case))
        return result if result is not None and result.device == device else None

    def remaining(self, part: str, cases: Iterable[Case], device: str) -> list[str]:
        """Return names of cases without a result on `device`, then of blocked or failed cases."""
        open_: list[str] = []
        repeated: list[str] = []
        for case in cases:
            result = self.find(part, case.name, device)
            if result is None:
                open_.append(case.name)
            elif result.state in ("blocked", "failed"):
                repeated.append(case.name)
        return [*open_, *repeated]

    def write(self, path: Path) -> None:
        """Replace the file at `path`. Raises BenchmarkError if it cannot be written."""
        cases = list(self.cases.values())
        content = encode_result(self.run, {"cases": cases}, build_tables(cases))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        except OSError as exc:
            raise BenchmarkError(
                f"cannot write `{path}`: {exc.strerror}", hint="name another file with --out FILE"
            ) from exc

    @classmethod
    def read_or_start(cls, path: Path, run: RunMetadata) -> GpuResults:
        """Read the results at `path`, or start without results if there is no such file.

        Raises BenchmarkError if the file is no result of this benchmark.
        """
        results = cls(run)
        if path.is_file():
            try:
                for entry in orjson.loads(path.read_bytes())["results"]["cases"]:
                    results._insert(CaseResult(**entry))
            except (ValueError, KeyError, TypeError) as exc:
                raise BenchmarkError(
                    f"`{path}` is no result of `bench gpu`: {exc!r}",
                    hint="name another file with --out FILE",
                ) from exc
        return results


def build_tables(cases: Sequence[CaseResult]) -> list[Table]:
    """Build the tables of docs/performance.md. Figures come from GPU runs, never from dry runs."""
    order = [
        (name, case.name)
        for name, part in PARTS.items()
        for case in part.cases(Target(is_cuda=True))
    ]
    by_name = {(case.part, case.case): case for case in cases if case.device == "cuda"}
    on_gpu = [by_name[name] for name in order if name in by_name]
    figures = (
        _parity_table([c for c in on_gpu if c.part in ("encoder-parity", "decoder-parity")]),
        _latency_table(_passed(on_gpu, "encoder-latency")),
        _server_table(_passed(on_gpu, "server")),
        _large_table(_passed(on_gpu, "bert-large")),
        _streams_table(_passed(on_gpu, "streams")),
        _memory_table(_passed(on_gpu, "memory")),
    )
    return [_unproven_table(cases), *(table for table in figures if table.rows)]


def _passed(cases: Iterable[CaseResult], part: str) -> list[CaseResult]:
    """Return the passed cases of a part. Only passed cases have figures."""
    return [case for case in cases if case.part == part and case.state == "passed"]


def _unproven_table(cases: Sequence[CaseResult]) -> Table:
    """Build a row per part: cases proven on a GPU, states of the other cases, unproven cases."""
    rows = []
    on_gpu = {(result.part, result.case): result for result in cases if result.device == "cuda"}
    dry = _find_dry_paths(cases)
    for name, part in PARTS.items():
        names = [case.name for case in part.cases(Target(is_cuda=True))]
        either = {case: on_gpu.get((name, case)) or dry.get(_path(name, case)) for case in names}
        found = {case: result for case, result in either.items() if result is not None}
        proven = [case for case, result in found.items() if result.is_proof]
        unproven = [case for case in names if case not in proven]
        states = Counter(f"{r.state} on {r.device}" for r in found.values() if not r.is_proof)
        states["never run"] += len(names) - len(found)
        shown = ", ".join(f"{count} {state}" for state, count in states.items() if count)
        listed = "none" if not unproven else "all" if not proven else ", ".join(unproven)
        rows.append((name, part.title, f"{len(proven)} of {len(names)}", shown or "-", listed))
    columns = ("part", "what", "proven on a GPU", "of the rest", "unproven")
    return Table("unproven", columns, rows)


def _find_dry_paths(cases: Sequence[CaseResult]) -> dict[tuple[str, str], CaseResult]:
    """Map each key of `_path` to its dry-run result, or to the worst of several results."""
    dry = [result for result in cases if result.device == "cpu"]
    dry.sort(key=lambda result: get_args(State).index(result.state))
    return {_path(result.part, result.case): result for result in dry}


def _path(part: str, case: str) -> tuple[str, str]:
    """Return a key that a case on a GPU and its dry run share.

    The key omits the number of streams, which is lower in dry runs.
    """
    return part, case.rpartition("/")[0] if part == "streams" else case


def _parity_table(cases: Sequence[CaseResult]) -> Table:
    rows = [
        (
            result.case,
            result.state,
            _number(result.values.get("cosine_worst"), 4),
            _number(result.values.get("batched_cosine_worst"), 4),
            _number(result.values.get("top1_agreement"), 4),
            result.reason or "-",
        )
        for result in cases
    ]
    columns = ("case", "state", "worst cosine", "batched", "top-1", "reason")
    return Table("parity", columns, rows)


def _latency_table(cases: Sequence[CaseResult]) -> Table:
    """Build a row per engine and number of items, with a column per number of tokens."""
    rows: dict[tuple[str, int], dict[int, str]] = {}
    for result in cases:
        for timing in result.values["shapes"]:
            items, count = map(int, timing["shape"].split("x"))
            row = rows.setdefault((result.case, items), {})
            row[count] = f"{timing['mean_ms']:.2f} ± {timing['deviation_ms']:.2f}"
    tokens = sorted({count for row in rows.values() for count in row})
    return Table(
        "latency",
        ("engine", "items", *(f"{count} tokens" for count in tokens)),
        [
            (engine, str(items), *(row.get(count, "-") for count in tokens))
            for (engine, items), row in rows.items()
        ],
    )


def _server_table(cases: Sequence[CaseResult]) -> Table:
    """Build a row per load of the case `throughput`."""
    rows = [
        (
            row["model"].removeprefix("gpu/"),
            row["device"],
            str(row["connections"]),
            _number(row.get("embeddings_per_s"), 0),
            _number(row.get("tokens_per_s"), 0),
            format_number(row["p50"], 1),
            format_number(row["p99"], 1),
        )
        for result in cases
        for row in result.values.get("rows", ())
    ]
    columns = ("model", "device", "connections", "embeddings/s", "tokens/s", "p50 ms", "p99 ms")
    return Table("server", columns, rows)


def _large_table(cases: Sequence[CaseResult]) -> Table:
    rows = [
        (
            result.case,
            shape["shape"],
            format_number(shape["items_per_s"], 1),
            f"{shape['share_of_matrix_rate']:.1%}",
            f"{shape['share_of_known']:.1%}",
        )
        for result in cases
        for shape in result.values["shapes"]
    ]
    columns = ("engine", "shape", "samples/s", "of the matrix rate", "of 8,836/s")
    return Table("bert-large", columns, rows)


def _streams_table(cases: Sequence[CaseResult]) -> Table:
    rows = []
    for result in cases:
        model, system, streams = result.case.split("/")
        values = result.values
        step = (
            f"{values['mean_ms']:.2f} ± {values['deviation_ms']:.2f}"
            if "mean_ms" in values
            else "-"
        )
        rows.append(
            (
                model,
                system,
                streams,
                format_number(values["total_tokens_per_s"]),
                _number(values.get("tokens_per_s"), 0),
                step,
                _number(values.get("late_to_early_step"), 2),
                _number(values.get("prefill_tokens_per_s"), 0),
            )
        )
    columns = ("model", "system", "streams", "tokens/s", "after prefill", "step ms",
               "late/early step", "prefill tokens/s")  # fmt: skip
    return Table("streams", columns, rows)


def _memory_table(cases: Sequence[CaseResult]) -> Table:
    rows = []
    for result in cases:
        values: Mapping[str, Any] = result.values
        first = max(values["steps"], key=lambda step: step["slots"])
        rows.append(
            (
                result.case,
                    *(
                    f"{values[name] / 1e6:,.1f}"
                    for name in ("weight_file_bytes", "kv_cache_bytes", "open_bytes",
                                 "capture_bytes", "left_bytes")
                ),
                f"{first['first_s'] * 1e3:.1f} / {first['next_s'] * 1e3:.1f}",
            )
        )  # fmt: skip
    columns = ("engine", "weights MB", "KV cache MB", "opened MB", "captures MB",
               "left MB", "first / next step ms")  # fmt: skip
    return Table("memory", columns, rows)


def _number(value: Any, digits: int) -> str:
    return "-" if value is None else format_number(value, digits)
