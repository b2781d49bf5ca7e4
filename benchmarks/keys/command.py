"""Benchmark of API keys: latency of refusals, cost under load, and precision of a rate limit.

The command starts its own server. Every round has a phase with keys and a phase without keys. To
switch, the command adds the key file to the configuration of the running server, or removes it.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import uvloop

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress, build_inference_body, task_path
from benchmarks.common.options import DEFAULT_MODEL, add_run_options
from benchmarks.common.report import (
    RunMetadata,
    log_progress,
    publish,
    publish_at_end,
    start_run,
)
from benchmarks.common.sentences import load_sentences
from benchmarks.common.serve_config import ServeConfig
from benchmarks.common.statistics import percentiles_ms
from benchmarks.keys.results import KeysResults, build_tables, evaluate_goals
from benchmarks.servers.own_server import start_server
from benchmarks.servers.processes import stop_signals_interrupt
from benchmarks.serving.load import LoadPlan, LoadResult, Workload, run_load
from cluster.default_config import CONFIG_HELP, find_config
from cluster.launcher.serve_status import read_token
from cluster.probes import DIRECT
from deployments.artifacts.types import TaskName
from deployments.deployment_names import INGRESS
from deployments.keys.key import ApiKey, KeyLimits, generate_key, hash_key, key_id
from deployments.keys.key_file import KeyFile, change_key_file
from deployments.terminal.command_line import positive_count, positive_seconds

TASK = TaskName.FEATURE_EXTRACTION.value
LOG_NAME = "hundredfold.log"
NOISY_PER_MINUTE = 1_200
NOISY_CONNECTIONS = 4
WARM_UP_REFUSALS = 1_000  # number per kind; not measured, because a new server is slower
SETTLE_S = 10.0  # s of warm-up, in which the noisy client empties its token bucket
CHANGE_TIMEOUT_S = 30.0
REFUSED = "429"  # failure of a request that a rate limit refuses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="ID", help="default: %(default)s")
    parser.add_argument("--connections", type=positive_count, default=64, metavar="N")
    parser.add_argument("--rounds", type=positive_count, default=8, metavar="N")
    parser.add_argument(
        "--seconds", type=positive_seconds, default=5.0, metavar="S", help="of each phase"
    )
    parser.add_argument("--refusals", type=positive_count, default=1_000, metavar="N")


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results. Missed goals are only reported.

    If the run ends early, write the rounds that were measured.

    Raises BenchmarkError if a wrong key gets another status than 401, or if a request fails while
    the cost of keys is measured. Failures in the phases of the noisy client are a goal.
    """
    metadata = start_run("keys", arguments.command_line, arguments.seed)
    measured: list[KeysResults] = []  # after each round

    def publish_results(run: RunMetadata) -> None:
        if measured:
            results = measured[-1]
            notes = [goal.sentence for goal in evaluate_goals(results)]
            publish(arguments, run, results, build_tables(results), notes=notes)

    config = find_config(arguments.config)
    with (
        publish_at_end(metadata, publish_results),
        stop_signals_interrupt(),
        tempfile.TemporaryDirectory(prefix="keys-") as directory,
        start_server(config, arguments.out) as server,
    ):
        keys = KeySet(Path(directory) / "keys.json")
        settings = LiveSettings(arguments.out / LOG_NAME, config, server.address.port)
        for results in measure(server.address, settings, keys, arguments):
            measured.append(results)
    return 0


class KeySet:
    """A key file with one key for each client of the benchmark."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.usual = self._add("usual")
        self.noisy = self._add("noisy", KeyLimits(requests_per_minute=NOISY_PER_MINUTE))

    def _add(self, name: str, limits: KeyLimits | None = None) -> str:
        text = generate_key()
        key = ApiKey(
            id=key_id(text),
            name=name,
            sha256=hash_key(text).hex(),
            created=datetime.now(UTC),
            limits=limits or KeyLimits(),
        )
        change_key_file(self.path, lambda content: KeyFile(keys=(*content.keys, key)))
        return text


class LiveSettings:
    """Configuration of a running server, changed over Serve's REST API as by `serve deploy`."""

    def __init__(self, log: Path, config: Path, port: int) -> None:
        """Find the address of Ray's dashboard in `log`, the output of the launcher.

        Raises BenchmarkError if the log has no address.
        """
        found = re.search(r"dashboard on ([\d.:]+)", log.read_text(encoding="utf-8"))
        if found is None:
            raise BenchmarkError(f"`{log}` names no dashboard", hint="see why the start failed")
        self._url = f"http://{found[1]}/api/serve/applications/"
        self._config = ServeConfig.read(config)
        self._config.document["http_options"]["port"] = port

    def set_key_file(self, path: Path | None) -> None:
        """Deploy the configuration with key file `path`. None turns keys off.

        Raises BenchmarkError if Ray Serve rejects the configuration.
        """
        ingress = self._config.find_deployment(INGRESS)
        ingress["user_config"]["key_file"] = None if path is None else str(path)
        request = urllib.request.Request(
            self._url,
            method="PUT",
            data=orjson.dumps(self._config.document),
            headers={
                "authorization": f"Bearer {read_token(os.environ)}",
                "content-type": "application/json",
            },
        )
        try:
            with DIRECT.open(request, timeout=CHANGE_TIMEOUT_S):
                pass
        except urllib.error.HTTPError as error:
            raise BenchmarkError(
                f"Ray Serve refused the configuration: {error.read()[:500]!r}", hint="see its log"
            ) from error


def measure(
    address: ServerAddress, settings: LiveSettings, keys: KeySet, arguments: argparse.Namespace
) -> Iterator[KeysResults]:
    """Measure all but the cost of keys first. Yield the results after each round of the cost."""
    texts = load_sentences(None, arguments.seed).texts
    path = task_path(TASK, arguments.model)

    def build(key: str | None) -> list[bytes]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return [address.build_post(path, build_inference_body(text), headers) for text in texts]

    switch_keys(settings, address, keys.path)
    refusals = measure_refusals(address, path, arguments.refusals)
    quiet, noisy = build(keys.usual), build(keys.noisy)
    clients = uvloop.run(measure_noisy(address, quiet, noisy, 3 * arguments.seconds))
    rates: dict[bool, list[float]] = {False: [], True: []}
    for round_ in range(arguments.rounds):
        for is_keyed in (False, True) if round_ % 2 == 0 else (True, False):
            switch_keys(settings, address, keys.path if is_keyed else None)
            result = load(address, build(keys.usual if is_keyed else None), arguments)
            log_progress(f"keys {is_keyed}: {result.requests_per_s:.0f} requests/s")
            rates[is_keyed].append(result.requests_per_s)
        yield KeysResults(
            refusal_ms=refusals,
            connections=arguments.connections,
            without_keys=tuple(rates[False]),
            with_keys=tuple(rates[True]),
            **clients,
        )


def switch_keys(settings: LiveSettings, address: ServerAddress, path: Path | None) -> None:
    """Apply key file `path`, or turn keys off if it is None. Wait until the change has an effect.

    Raises BenchmarkError after CHANGE_TIMEOUT_S.
    """
    expected = 200 if path is None else 401
    if ask_status(address) == expected:
        return
    settings.set_key_file(path)
    deadline_s = time.perf_counter() + CHANGE_TIMEOUT_S
    while ask_status(address) != expected:
        if time.perf_counter() > deadline_s:
            raise BenchmarkError("the server does not apply the key file", hint="see its log")
        time.sleep(0.1)


def ask_status(address: ServerAddress) -> int:
    """Request the list of models without a key. Return the status; 0 without a response."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
    try:
        connection.request("GET", f"{address.prefix}/v1/models?limit=1")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def measure_refusals(
    address: ServerAddress, path: str, count: int
) -> dict[str, Mapping[str, float]]:
    """Measure the latency of refusals: without a key, with an unknown key, with a malformed key.

    The three kinds take turns, each on its own connection. Return percentiles by kind.
    """
    cases = {"no key": None, "unknown key": generate_key(), "another form": "x" * 40}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with ExitStack() as stack:
        connections = {
            name: stack.enter_context(
                closing(http.client.HTTPConnection(address.host, address.port, timeout=30))
            )
            for name in cases
        }
        for _ in range(WARM_UP_REFUSALS + count):
            for name, key in cases.items():
                seconds[name].append(_time_refusal(connections[name], address.prefix + path, key))
    return {name: percentiles_ms(each[WARM_UP_REFUSALS:]) for name, each in seconds.items()}


def _time_refusal(connection: http.client.HTTPConnection, path: str, key: str | None) -> float:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = build_inference_body("A sentence.")
    started_s = time.perf_counter()
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    response.read()
    ended_s = time.perf_counter()
    if response.status != 401:
        raise BenchmarkError(f"a wrong key got {response.status}", hint="see the server's log")
    return ended_s - started_s


def load(
    address: ServerAddress, requests: Sequence[bytes], arguments: argparse.Namespace
) -> LoadResult:
    plan = LoadPlan(connections=arguments.connections, seconds=arguments.seconds)
    result: LoadResult = uvloop.run(run_load(address, Workload(requests), plan))
    if result.failures:
        raise BenchmarkError(f"requests failed: {dict(result.failures)}", hint="see the server")
    return result


async def measure_noisy(
    address: ServerAddress, quiet: Sequence[bytes], noisy: Sequence[bytes], seconds: float
) -> dict[str, Any]:
    """Measure a quiet client alone, then with a noisy client that exceeds its own rate limit."""
    plan = LoadPlan(connections=1, seconds=seconds, warm_up_s=2.0)
    alone = await run_load(address, Workload(quiet), plan)
    loud = LoadPlan(connections=NOISY_CONNECTIONS, seconds=seconds, warm_up_s=SETTLE_S)
    beside, result = await asyncio.gather(
        run_load(address, Workload(quiet), replace(plan, warm_up_s=SETTLE_S)),
        run_load(address, Workload(noisy), loud),
    )
    return summarize_noisy(alone, beside, result)


def summarize_noisy(alone: LoadResult, beside: LoadResult, noisy: LoadResult) -> dict[str, Any]:
    """Return the fields of KeysResults about the quiet client, alone and beside the noisy one."""
    others = Counter(noisy.failures)
    refused = others.pop(REFUSED, 0)
    return {
        "noisy_allowed_per_s": NOISY_PER_MINUTE / 60,
        "noisy_answered_per_s": noisy.requests_per_s,
        "noisy_refused_per_s": refused / (noisy.seconds + SETTLE_S),
        "noisy_failures": others,
        "quiet_alone_ms": percentiles_ms(alone.latencies_s),
        "quiet_beside_ms": percentiles_ms(beside.latencies_s),
        "quiet_failures": Counter(alone.failures) + Counter(beside.failures),
    }
