"""Tests of builds during serving: pulls, waiting requests, progress events, failing builders."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.artifacts.store import model_directory
from deployments.builds.queue import DRAIN_LOCK_NAME, MAX_CRASHES, BuildClaim, BuildQueue
from deployments.builds.record import BuildState
from deployments.config import BuildSettings, IngressUserConfig
from deployments.ingress import builds
from deployments.keys.key import Scope
from deployments.records import RequestRecord
from deployments.registry import model_registry
from tests.support.asgi_client import lifespan
from tests.support.fake_builds import FakeBuilder, Killed, fail, seal_at_once
from tests.support.fakes import TIMEOUT_S, ListRecorder, RecordingEncoder, wait_until
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

MODEL = "acme/tiny"
PULLS = BuildSettings(allow_pull=True, wait_s=TIMEOUT_S)
TEXT = {"inputs": "a"}
WAITING = {"inputs": "a", "options": {"wait_for_model": True}}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "has_compiler", lambda: True)  # fake builders need no compiler
    monkeypatch.setattr(builds, "POLL_S", 0.005)
    monkeypatch.setattr(builds, "EVENT_S", 0.005)
    monkeypatch.setattr(builds, "ELSEWHERE_S", 0.005)


@asynccontextmanager
async def serving(
    store: Path,
    builder: FakeBuilder,
    settings: BuildSettings = PULLS,
    recorder: ListRecorder[RequestRecord] | None = None,
    **options: object,
) -> AsyncIterator[httpx.AsyncClient]:
    """Run a server and its lifespan, which keeps a builder running while builds wait."""
    user_config = IngressUserConfig(builds=settings, **options)
    server = InProcess(
        store,
        models=(MODEL,),
        settings=user_config,
        start_builder=builder,
        encoder=RecordingEncoder(),
        recorder=recorder or ListRecorder(),
    )
    async with server.application() as app, lifespan(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http


class Held:
    """Work of a builder that waits for `may_end` before it publishes the model."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def __call__(self, store: Path, claim: BuildClaim) -> None:
        claim.enter(BuildState.BUILDING, "export")
        assert self.may_end.wait(TIMEOUT_S)
        seal_at_once(store, claim)


@pytest.fixture
def held() -> Held:
    return Held()


async def test_unknown_model_is_built_and_the_request_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBuilder(seal_at_once)) as http:
        response = await http.post("/models/acme/other", json=WAITING)
        assert response.status_code == 200, response.text
        status = (await http.get("/status/acme/other")).json()
    assert (status["build"]["state"], status["build"]["percent"]) == ("ready", 100)


async def test_request_with_tensors_waits_for_a_build(tmp_path: Path) -> None:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    body = {"inputs": [tensor], "parameters": {"wait_for_model": True}}
    async with serving(tmp_path, FakeBuilder(seal_at_once)) as http:
        response = await http.post("/v2/models/acme/other/infer", json=body)
    assert response.status_code == 200, response.text


async def test_request_that_waited_for_a_build_is_recorded_once(tmp_path: Path, held: Held) -> None:
    def build(store: Path, claim: BuildClaim) -> None:
        work = held if claim.record.id == "acme/third" else seal_at_once
        work(store, claim)

    recorder: ListRecorder[RequestRecord] = ListRecorder()
    async with serving(tmp_path, FakeBuilder(build), recorder=recorder) as http:
        assert (await http.post("/models/acme/other", json=WAITING)).status_code == 200
        assert (await http.post("/models/acme/third", json=TEXT)).status_code == 503
        held.may_end.set()
    assert [(record.status, record.model) for record in recorder.records] == [
        (200, "acme/other"),
        (503, "none"),
    ]


async def test_request_that_does_not_wait_gets_503_until_the_model_is_ready(
    tmp_path: Path, held: Held
) -> None:
    async with serving(tmp_path, FakeBuilder(held)) as http:
        response = await http.post(f"/models/{MODEL}", json=TEXT)
        assert response.status_code == 503
        body = response.json()
        assert body["code"] == "model_loading"
        assert "estimated_time" not in body, "nothing was measured"
        assert "No build of this server was measured yet" in body["error"]
        assert response.headers["retry-after"] == "10"
        held.may_end.set()
        again = await http.post(f"/models/{MODEL}", json=TEXT, headers={"x-wait-for-model": "true"})
        assert again.status_code == 200


async def test_estimated_time_comes_from_earlier_builds(tmp_path: Path, held: Held) -> None:
    line = {"id": "a/b", "size": 1, "seconds": {"pulling": 100, "building": 800, "verifying": 100}}
    directory = BuildQueue(tmp_path).directory
    directory.mkdir(parents=True)
    (directory / "history.jsonl").write_text(json.dumps(line) + "\n")
    async with serving(tmp_path, FakeBuilder(held)) as http:
        response = await http.post(f"/models/{MODEL}", json=TEXT)
        # In the stage `building`, the estimate is below 900 and falls.
        assert 800 <= response.json()["estimated_time"] <= 1000
        assert int(response.headers["retry-after"]) >= 800
        held.may_end.set()


async def test_concurrent_requests_cause_one_build(tmp_path: Path) -> None:
    builder = FakeBuilder(seal_at_once)
    async with serving(tmp_path, builder) as http:
        calls = [http.post(f"/models/{MODEL}", json=WAITING) for _ in range(16)]
        responses = await asyncio.gather(*calls)
    assert {response.status_code for response in responses} == {200}
    assert builder.builds == [MODEL]


async def test_waiting_ends_with_the_estimate(tmp_path: Path, held: Held) -> None:
    settings = BuildSettings(allow_pull=True, wait_s=0.05)
    async with serving(tmp_path, FakeBuilder(held), settings) as http:
        response = await http.post(f"/models/{MODEL}", json=WAITING)
        assert (response.status_code, response.json()["code"]) == (503, "model_loading")
        held.may_end.set()


async def test_failed_build_is_reported_and_not_repeated_by_requests(tmp_path: Path) -> None:
    builder = FakeBuilder(fail)
    async with serving(tmp_path, builder) as http:
        for _ in range(3):
            response = await http.post("/models/acme/bad", json=WAITING)
            assert (response.status_code, response.json()["code"]) == (404, "build_failed")
            assert "`model.safetensors` is corrupt" in response.json()["error"]
        status = (await http.get("/status/acme/bad")).json()
    assert (status["state"], status["loaded"]) == ("Error", False)
    assert status["build"]["reason"] == "`model.safetensors` is corrupt"
    assert builder.builds == ["acme/bad"]


async def test_killed_builder_is_started_again_and_the_build_goes_on(tmp_path: Path) -> None:
    def die_first(store: Path, claim: BuildClaim) -> None:
        claim.enter(BuildState.BUILDING, "export")
        if claim.record.attempts == 1:
            raise Killed
        seal_at_once(store, claim)

    builder = FakeBuilder(die_first)
    async with serving(tmp_path, builder) as http:
        response = await http.post(f"/models/{MODEL}", json=WAITING)
    assert response.status_code == 200
    assert (builder.starts, builder.builds) == (2, [MODEL, MODEL])


async def test_build_that_always_kills_its_builder_fails(tmp_path: Path) -> None:
    def die(_store: Path, _claim: BuildClaim) -> None:
        raise Killed

    builder = FakeBuilder(die)
    async with serving(tmp_path, builder) as http:
        response = await http.post(f"/models/{MODEL}", json=WAITING)
        assert response.json()["code"] == "build_failed"
        assert "ended 3 times" in response.json()["error"]


async def test_builds_of_an_earlier_server_go_on(tmp_path: Path) -> None:
    BuildQueue(tmp_path).submit(MODEL, "demo")
    async with serving(tmp_path, FakeBuilder(seal_at_once), BuildSettings()) as http:
        await wait_until(lambda: not BuildQueue(tmp_path).pending())
        assert (await http.post(f"/models/{MODEL}", json=WAITING)).status_code == 200


async def test_build_that_another_process_leaves_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "IDLE_S", 0.005)
    queue, builder = BuildQueue(tmp_path), FakeBuilder(seal_at_once)
    async with serving(tmp_path, builder, BuildSettings()):
        await asyncio.sleep(0.05)  # the server has found an empty queue
        queue.submit(MODEL, "demo")
        await wait_until(lambda: not queue.pending())
    assert builder.builds == [MODEL]


async def test_no_builder_is_started_for_builds_of_other_processes(tmp_path: Path) -> None:
    queue, builder = BuildQueue(tmp_path), FakeBuilder(seal_at_once)
    queue.submit(MODEL, "demo")
    with ExitStack() as other:
        other.enter_context(queue.claim(MODEL))
        async with serving(tmp_path, builder, BuildSettings()):
            await asyncio.sleep(0.05)
            assert builder.starts == 0
            other.close()  # the other builder ends during the build
            await wait_until(lambda: not queue.pending())
    assert builder.builds == [MODEL]


async def test_builder_that_left_builds_to_another_process_is_soon_started_again(
    tmp_path: Path,
) -> None:
    builder = FakeBuilder(seal_at_once, busy_starts=12)
    async with serving(tmp_path, builder) as http:
        response = await http.post(f"/models/{MODEL}", json=WAITING)
    assert response.status_code == 200, "pauses that double take longer than `wait_s`"
    assert builder.starts == 13


async def test_builds_start_once_their_lock_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue, builder = BuildQueue(tmp_path), FakeBuilder(seal_at_once)
    queue.submit(MODEL, "demo")
    lock = queue.directory / DRAIN_LOCK_NAME
    lock.symlink_to(lock)  # opening a loop of links fails, also for root
    async with serving(tmp_path, builder, BuildSettings()):
        await wait_until(lambda: "no builder can be started" in caplog.text)
        lock.unlink()
        await wait_until(lambda: not queue.pending())
    assert builder.builds == [MODEL]


async def test_model_that_was_removed_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "SERVED_AFTER_S", 0.1)
    monkeypatch.setattr(model_registry, "REFRESH_S", 0.0)
    builder = FakeBuilder(seal_at_once)
    async with serving(tmp_path, builder) as http:
        await http.post("/models/acme/other", json=WAITING)
        shutil.rmtree(model_directory(tmp_path, "acme/other"))
        await asyncio.sleep(0.2)
        assert (await http.get("/status/acme/other")).status_code == 404
        again = await http.post("/models/acme/other", json=WAITING)
        assert again.status_code == 200, again.text
    assert builder.builds == ["acme/other"] * 2


def run_until_interrupted(_store: Path, claim: BuildClaim) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while claim.record.is_running and time.monotonic() < end_s:
        time.sleep(0.005)
    raise Killed


async def test_builder_that_starts_when_the_server_stops_is_stopped(tmp_path: Path) -> None:
    is_starting, may_start = threading.Event(), threading.Event()
    builder = FakeBuilder(run_until_interrupted)

    def start(store: Path, max_memory_bytes: int) -> Any:
        is_starting.set()
        assert may_start.wait(TIMEOUT_S)
        return builder(store, max_memory_bytes)

    BuildQueue(tmp_path).submit(MODEL, "demo")
    service = builds.BuildService(BuildQueue(tmp_path), lambda _id: False, start)
    async with asyncio.timeout(TIMEOUT_S), service.running():
        await wait_until(is_starting.is_set)
        asyncio.get_running_loop().call_later(0.01, may_start.set)
    assert builder.starts == 1
    record = BuildQueue(tmp_path).read(MODEL)
    assert record is not None
    assert record.state is BuildState.QUEUED


async def test_builder_stops_with_the_server_and_its_build_survives_restarts(
    tmp_path: Path,
) -> None:
    started = threading.Event()

    def work(store: Path, claim: BuildClaim) -> None:
        started.set()
        run_until_interrupted(store, claim)

    BuildQueue(tmp_path).submit(MODEL, "demo")
    for _ in range(MAX_CRASHES + 1):
        started.clear()
        async with serving(tmp_path, FakeBuilder(work)):
            await wait_until(started.is_set)
        record = BuildQueue(tmp_path).read(MODEL)
        assert record is not None
        assert record.state is BuildState.QUEUED
    async with serving(tmp_path, FakeBuilder(seal_at_once)) as http:
        assert (await http.post(f"/models/{MODEL}", json=WAITING)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/models/acme/other", "/models/deployments/../x", "/models/no-organization"]
)
async def test_nothing_is_pulled_unless_it_is_allowed(tmp_path: Path, path: str) -> None:
    settings = BuildSettings(allow_pull="other" not in path)
    async with serving(tmp_path, FakeBuilder(seal_at_once), settings) as http:
        response = await http.post(path, json=WAITING)
        assert response.status_code == 404, response.text
        assert (await http.get(path.replace("/models", "/status"))).status_code == 404
    assert not BuildQueue(tmp_path).pending()


async def test_reading_about_a_model_pulls_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBuilder(seal_at_once)) as http:
        for path in ("/models/acme/other/info", "/status/acme/other", "/models/acme/other"):
            assert (await http.get(path)).status_code == 404
    assert not BuildQueue(tmp_path).pending()


async def test_key_pulls_only_models_that_it_permits(tmp_path: Path) -> None:
    key_file = tmp_path / "keys.json"
    key = add_key(key_file, scopes=(Scope.INFER,), models=("acme/*",))
    store = tmp_path / "store"
    async with serving(store, FakeBuilder(seal_at_once), key_file=key_file) as http:
        for path in ("/models/other/tiny", "/status/other/tiny"):
            method = "POST" if "models" in path else "GET"
            response = await http.request(method, path, json=WAITING, headers=bearer(key))
            assert response.status_code == 403
        allowed = await http.post(f"/models/{MODEL}", json=WAITING, headers=bearer(key))
        assert allowed.status_code == 200
        status = await http.get(f"/status/{MODEL}@latest", headers=bearer(key))
        assert status.status_code == 200
    assert BuildQueue(store).read("other/tiny") is None


@pytest.mark.parametrize("source", ["other/tiny", "/models/tiny", "pypi:tiny/model.onnx"])
async def test_key_copies_no_foreign_source_to_a_model_that_it_permits(
    tmp_path: Path, source: str
) -> None:
    key_file = tmp_path / "keys.json"
    key = add_key(key_file, scopes=(Scope.ADMIN,), models=("acme/*",))
    async with serving(tmp_path / "store", FakeBuilder(seal_at_once), key_file=key_file) as http:
        body = {"source": source, "id": MODEL}
        refused = await http.post("/models", json=body, headers=bearer(key))
        assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
        body = {"source": "acme/other", "id": MODEL}
        allowed = await http.post("/models", json=body, headers=bearer(key))
        assert allowed.status_code == 200


async def test_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    BuildQueue(tmp_path).directory.touch()  # a file, not a directory: not even root can write there
    async with serving(tmp_path, FakeBuilder(seal_at_once)) as http:
        response = await http.post("/models/acme/other", json=WAITING)
    assert (response.status_code, response.json()["code"]) == (503, "store_not_writable")
