"""Version changes under steady load: rebuild, alias, canary, promote, rollback, pull, removal.

The command starts its own server with versions of one tiny model. The answers of the versions
differ. Every answer names its version and must equal the right answer of this version. Some steps
kill a replica.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.options import add_run_options
from benchmarks.common.random_checkpoints import TINY_BERT, write_bert
from benchmarks.common.report import Table, log_progress, publish, start_run
from benchmarks.common.statistics import Goal, require_goals
from benchmarks.common.wire import build_request, require_ok, send_raw
from benchmarks.many_models.command import build_config
from benchmarks.many_models.store import write_tiny_models, write_version
from benchmarks.rollouts.load import (
    GRACE_S,
    RolloutAnswer,
    VersionedLoad,
    ask,
    ask_version,
    read_version,
)
from benchmarks.servers.own_server import Server, start_server
from benchmarks.servers.process_kinds import KINDS, find_processes
from benchmarks.servers.processes import is_ready, stop_signals_interrupt
from deployments.artifacts.types import TaskName
from deployments.deployment_names import INGRESS
from deployments.terminal.command_line import positive_number

# No version of REBUILT is promoted, so its latest version answers.
MODEL, REBUILT, PULLED = "rollout/model", "rollout/rebuilt", "rollout/pulled"
A, B, C, D = (f"{number:012x}" for number in (0xA, 0xB, 0xC, 0xD))
SEEDS = {A: 1, B: 2, C: 3, D: 4}
CANARY = f"{MODEL}@canary"
CANARY_PERCENT = 10.0
# Maximum distance of the measured share from CANARY_PERCENT, in standard deviations of the share
# among this number of requests. Hashes of keys decide, so a right split exceeds it in about one of
# 16,000 runs with different seeds.
MAX_SPLIT_DEVIATIONS = 4.0
STEADY = (MODEL, f"{MODEL}@{A}", CANARY, REBUILT)  # names that the load requests in turn
SPLIT_STEP = "canary 10 %"
POOL_BYTES = 1 << 30
RECOVERY_S = 60.0  # maximum time until a killed replica is replaced
PULL_S = 150.0  # maximum time until a pulled model is built
PROMOTED_TIMEOUT_S = 30.0
# Number of successive rounds that only the promoted version must answer. A round requests MODEL and
# CANARY once. This number of rounds most likely reaches every ingress replica.
PROMOTED_ANSWERS = 20
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcomes of the requests that are sent during one step, such as a rollback."""

    step: str
    killed: str  # kind of the replica that this step kills; empty: none
    requests: int
    failed: int
    wrong: int
    stale: int  # number of right answers of versions that should not answer
    longest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResults:
    rate: float  # requests/s
    steps: Sequence[StepResult]
    split_requests: int  # number of requests that `split_percent` covers
    # Share of the canary version among the requests to MODEL in the step SPLIT_STEP. The first
    # GRACE_S of the step are left out.
    split_percent: float
    statuses: dict[str, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument(
        "--rate", type=positive_number, default=60.0, metavar="N", help="requests/s"
    )
    parser.add_argument(
        "--seconds", type=positive_number, default=8.0, metavar="S", help="of each step"
    )
    parser.add_argument("--split-seconds", type=positive_number, default=60.0, metavar="S")
    parser.add_argument("--no-pull", action="store_true", help="leave out the build of a model")


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results. Raises BenchmarkError for a failed step or a missed goal."""
    metadata = start_run("rollouts", arguments.command_line, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="rollouts-") as directory, stop_signals_interrupt():
        root = Path(directory)
        write_tiny_models(root / "store", 1)
        for version, seed in SEEDS.items():
            write_version(root / "store", MODEL, version, seed)
        write_version(root / "store", REBUILT, A, SEEDS[A])
        with start_server(write_own_config(root), arguments.out) as server:
            results = asyncio.run(Rollouts(server, root, arguments).measure())
    goals = evaluate_goals(results)
    notes = [goal.sentence for goal in goals]
    publish(arguments, metadata, results, [build_table(results)], notes=notes)
    require_goals(goals, hint="see the server's log")
    return 0


def write_own_config(root: Path) -> Path:
    config = build_config(root, POOL_BYTES)
    config.find_deployment(INGRESS)["user_config"]["builds"]["allow_pull"] = True
    config.arguments["models"].append({"id": MODEL})
    return config.write(root)


class Rollouts:
    """The version changes, which run one after the other under steady load."""

    def __init__(self, server: Server, root: Path, arguments: argparse.Namespace) -> None:
        self._server, self._root, self._arguments = server, root, arguments
        self._killed: dict[str, str] = {}

    async def measure(self) -> RolloutResults:
        address = self._server.address
        await self._manage("POST", f"{MODEL}@{A}/promote")
        await self._manage("POST", f"{MODEL}@{A}/alias", {"alias": "canary"})
        await self._wait_until_promoted()
        expected = {version: await ask_version(address, f"{MODEL}@{version}") for version in SEEDS}
        arguments = self._arguments
        load = VersionedLoad(address, expected, STEADY, arguments.rate, seed=arguments.seed)
        only = {name: frozenset({A}) for name in STEADY}
        load.begin_step("steady", only)
        load.start()
        try:
            await self._run_steps(load)
        finally:
            await load.stop()
        return self._summarize(load.answers)

    async def _wait_until_promoted(self) -> None:
        """Wait until the ingress has probed the promoted version and routes MODEL and CANARY to it.

        Raises BenchmarkError after PROMOTED_TIMEOUT_S.
        """
        deadline_s = time.perf_counter() + PROMOTED_TIMEOUT_S
        in_a_row = 0
        while in_a_row < PROMOTED_ANSWERS:
            if time.perf_counter() > deadline_s:
                raise BenchmarkError(
                    f"{MODEL}@{A} does not answer {PROMOTED_TIMEOUT_S:g} s after its promotion",
                    hint="see the server's log",
                )
            names = (MODEL, CANARY)
            answers = [await ask(self._server.address, name) for name in names]
            in_a_row = in_a_row + 1 if {read_version(each) for each in answers} == {A} else 0

    async def _run_steps(self, load: VersionedLoad) -> None:
        first, second = frozenset({A}), frozenset({B})
        store = self._root / "store"
        await self._hold()
        load.begin_step("rebuild", {REBUILT: frozenset({D})})
        await asyncio.to_thread(write_version, store, REBUILT, D, SEEDS[D])
        await self._hold()
        load.begin_step("alias moves", {CANARY: second})
        await self._manage("POST", f"{MODEL}@{B}/alias", {"alias": "canary"})
        await self._hold()
        load.begin_step(SPLIT_STEP, {MODEL: first | second})
        await self._manage("POST", f"{MODEL}@{B}/split", {"percent": CANARY_PERCENT})
        await self._kill("encoder", SPLIT_STEP)
        await asyncio.sleep(self._arguments.split_seconds)
        load.begin_step("promote", {MODEL: second})
        await self._manage("POST", f"{MODEL}@{B}/promote")
        await self._kill("tokenizer", "promote")
        await self._hold()
        load.begin_step("rollback", {MODEL: first})
        await self._manage("POST", f"{MODEL}/rollback")
        await self._manage("POST", f"{MODEL}@{B}/split", {"percent": 0})
        await self._kill("ingress", "rollback")
        await self._hold()
        if not self._arguments.no_pull:
            load.begin_step("pull", {})
            await self._pull()
            load.begin_step("remove the pulled model", {})
            await self._manage("DELETE", PULLED)
            await self._hold()
        load.begin_step("remove a version", {})
        await self._manage("DELETE", f"{MODEL}@{C}")
        await self._hold()

    async def _hold(self) -> None:
        await asyncio.sleep(self._arguments.seconds)

    async def _manage(self, method: str, route: str, body: dict[str, object] | None = None) -> None:
        """Call a management route. Raises BenchmarkError for a status other than 200."""
        address = self._server.address
        content = b"" if body is None else orjson.dumps(body)
        raw = build_request(method, f"{address.prefix}/models/{route}", content)
        answer = await send_raw(address, raw, TIMEOUT_S)
        log_progress(f"{method} {route}: {answer.status}")
        require_ok(answer, f"{method} {route}", hint="see the server's log")

    async def _kill(self, name: str, step: str) -> None:
        """Kill one replica. Wait until a new replica replaces it and the server is ready."""
        kind = KINDS[name]
        before = await asyncio.to_thread(find_processes, self._server.launcher, kind)
        self._killed[step] = name
        before[0].kill()
        deadline_s = time.perf_counter() + RECOVERY_S
        while time.perf_counter() < deadline_s:
            await asyncio.sleep(0.25)
            now = await asyncio.to_thread(find_processes, self._server.launcher, kind)
            is_replaced = before[0] not in now and len(now) >= len(before)
            if is_replaced and await asyncio.to_thread(
                is_ready, self._server.address.port, "/ready"
            ):
                return
        raise BenchmarkError(
            f"the {name} was not replaced within {RECOVERY_S:g} s", hint="see the server's log"
        )

    async def _pull(self) -> None:
        """Let the server build a model from a checkpoint, then request the model.

        Raises BenchmarkError if the build fails or takes longer than PULL_S.
        """
        source = self._root / "checkpoint"
        source.mkdir()
        await asyncio.to_thread(write_bert, source, TINY_BERT, TaskName.FEATURE_EXTRACTION, 1)
        address = self._server.address
        body = orjson.dumps({"source": str(source), "id": PULLED})
        raw = build_request("POST", f"{address.prefix}/models", body)
        answer = await send_raw(address, raw, TIMEOUT_S)
        log_progress(f"pull: {answer.status} {answer.body[:200]!r}")
        deadline_s = time.perf_counter() + PULL_S
        while time.perf_counter() < deadline_s:
            await asyncio.sleep(1)
            raw = build_request("GET", f"{address.prefix}/status/{PULLED}")
            build = orjson.loads((await send_raw(address, raw, TIMEOUT_S)).body).get("build") or {}
            if build.get("state") == "ready":
                await ask_version(address, PULLED)
                return
            if build.get("state") == "failed":
                break
        raise BenchmarkError(f"the pull did not end: {build}", hint="see .builds of the store")

    def _summarize(self, answers: Sequence[RolloutAnswer]) -> RolloutResults:
        in_split = [one for one in answers if one.step == SPLIT_STEP and one.name == MODEL]
        begins_s = min((one.started_s for one in in_split), default=0.0) + GRACE_S
        split = Counter(one.version for one in in_split if one.started_s > begins_s)
        requests = sum(split.values())
        return RolloutResults(
            rate=self._arguments.rate,
            steps=[
                summarize_step(step, [one for one in answers if one.step == step], self._killed)
                for step in dict.fromkeys(one.step for one in answers)
            ],
            split_requests=requests,
            split_percent=100 * split[B] / max(requests, 1),
            statuses={str(k): n for k, n in Counter(one.status for one in answers).items()},
        )


def summarize_step(
    step: str, answers: Sequence[RolloutAnswer], killed: dict[str, str]
) -> StepResult:
    outcomes = Counter(one.outcome for one in answers)
    return StepResult(
        step=step,
        killed=killed.get(step, ""),
        requests=len(answers),
        failed=outcomes["failed"],
        wrong=outcomes["wrong"],
        stale=outcomes["stale"],
        longest_s=max(one.ended_s - one.started_s for one in answers),
    )


def evaluate_goals(results: RolloutResults) -> list[Goal]:
    """Compare the results with their bounds. Without requests, the split is not measured."""
    requests = results.split_requests
    distance = abs(results.split_percent - CANARY_PERCENT) if requests else None
    return [
        Goal.at_most("failed requests", sum(step.failed for step in results.steps), 0),
        Goal.at_most("wrong answers", sum(step.wrong + step.stale for step in results.steps), 0),
        Goal.at_most(
            "points between the split and its weight",
            distance,
            round(max_split_distance(requests), 2),
        ),
    ]


def max_split_distance(requests: int) -> float:
    """Return MAX_SPLIT_DEVIATIONS of the share of the canary among `requests`, in points."""
    share = CANARY_PERCENT / 100
    deviation = math.sqrt(share * (1 - share) / max(requests, 1))
    return MAX_SPLIT_DEVIATIONS * 100 * deviation


def build_table(results: RolloutResults) -> Table:
    columns = ("step", "killed", "requests", "failed", "wrong", "of another version", "longest s")
    rows = [
        (
            step.step + (f": {results.split_percent:.1f} %" if step.step == SPLIT_STEP else ""),
            step.killed or "-",
            str(step.requests),
            str(step.failed),
            str(step.wrong),
            str(step.stale),
            f"{step.longest_s:.2f}",
        )
        for step in results.steps
    ]
    return Table("steps", columns, rows)
