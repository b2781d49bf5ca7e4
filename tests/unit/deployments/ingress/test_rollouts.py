from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from deployments.artifacts import manifest
from deployments.artifacts.store import model_directory
from deployments.artifacts.types import Device
from deployments.config import GeneratorSettings
from deployments.ingress.generation_executor import GenerationExecutor
from deployments.ingress.models import version_trials
from deployments.ingress.shadow_traffic import Comparison
from deployments.plan import changes
from deployments.plan.plan_file import read_plan
from tests.support.artifacts import (
    EMBEDDER,
    GRAPH_NAME,
    replace_sealed_file,
    seal_tiny,
    seal_tiny_version,
    tiny_manifest,
)
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.decoder_artifacts import GRAPH_NAME as DECODER_GRAPH
from tests.support.fakes import TIMEOUT_S, wait_until
from tests.support.in_process import InProcess

NEW, NEWEST = "bbbbbbbbbbb2", "ccccccccccc3"
URL = f"/models/{EMBEDDER}"
BODY = {"inputs": "good film", "options": {"use_cache": False}}
GENERATOR_CALLS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
    ("/v1/completions", {"prompt": "a"}),
    ("/generate", {"inputs": "a"}),
    ("", {"inputs": "a"}),
]


@pytest.fixture(autouse=True)
def _look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.registry.model_registry.REFRESH_S", 0.0)
    monkeypatch.setattr("deployments.watched_file.CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr("deployments.ingress.models.version_trials.RETRY_S", 0.01)


@pytest.fixture
def old(tmp_path: Path) -> str:
    return seal_tiny(tmp_path, EMBEDDER).name


async def ask(http: httpx.AsyncClient, url: str = URL, client: str = "1.2.3.4") -> str:
    response = await http.post(url, json=BODY, headers={"x-forwarded-for": client})
    assert response.status_code == 200, response.text
    return str(response.headers["x-sha"])


async def ask_until(http: httpx.AsyncClient, version: str) -> set[str]:
    """Send requests until `version` answers. Return the versions that answered before."""
    before = set()
    async with asyncio.timeout(TIMEOUT_S):
        while (answered := await ask(http)) != version:
            before.add(answered)
    return before


@asynccontextmanager
async def steady_load(http: httpx.AsyncClient) -> AsyncIterator[Counter[str]]:
    """Send requests during the block and count the answers by version. No request may fail."""
    answers: Counter[str] = Counter()

    async def ask_on(client: str) -> None:
        while True:
            answers[await ask(http, client=client)] += 1
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(ask_on(f"10.0.0.{number}")) for number in range(4)]
    yield answers
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes


async def test_rebuild_promotion_and_rollback_fail_no_request(tmp_path: Path, old: str) -> None:
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        async with steady_load(http) as answers:
            assert await ask(http) == old
            await wait_until(lambda: old in answers)
            seal_tiny_version(tmp_path, EMBEDDER, NEW)
            assert await ask_until(http, NEW) <= {old}
            await wait_until(lambda: NEW in answers)
            changes.promote(tmp_path, EMBEDDER, old)
            assert await ask_until(http, old) <= {NEW}
            seal_tiny_version(tmp_path, EMBEDDER, NEWEST)
            changes.promote(tmp_path, EMBEDDER, NEWEST)
            await wait_until(lambda: NEWEST in answers)
            changes.rollback(tmp_path, EMBEDDER)
            await ask_until(http, old)
        assert set(answers) == {old, NEW, NEWEST}


async def test_versions_give_their_own_answers(tmp_path: Path, old: str) -> None:
    seal_tiny_version(tmp_path, EMBEDDER, NEW)
    async with InProcess(tmp_path, models=()).client() as http:
        values = {
            version: (await http.post(f"{URL}@{version}", json=BODY)).json()
            for version in (old, NEW, "latest")
        }
        unknown = await http.post(f"{URL}@nope", json=BODY)
    assert values[old] != values[NEW] == values["latest"]
    assert unknown.status_code == 404
    assert NEW in unknown.json()["error"]


async def test_every_dialect_takes_a_version(tmp_path: Path, old: str) -> None:
    seal_tiny_version(tmp_path, EMBEDDER, NEW)
    name = f"{EMBEDDER}@{old}"
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["good film"]}
    calls = {
        f"/models/{name}": {"inputs": "good film"},
        "/v1/embeddings": {"input": "good film", "model": name},
        f"/v2/models/{EMBEDDER}/versions/{old}/infer": {"inputs": [tensor]},
        f"/v2/models/{name}/infer": {"inputs": [tensor]},
        f"/models/{name}/embed": {"inputs": "good film"},
    }
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        for path, body in calls.items():
            response = await http.post(path, json=body)
            assert (response.status_code, response.headers.get("x-sha")) == (200, old), path
        facts = (await http.get(f"/v1/models/{name}")).json()
    assert facts["version"] == old


@pytest.mark.parametrize("damage", ["graph", "digest", "manifest"])
async def test_version_that_fails_its_probe_stays_out(
    tmp_path: Path, old: str, damage: str
) -> None:
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        assert await ask(http) == old
        directory = model_directory(tmp_path, EMBEDDER) / NEW
        async with steady_load(http) as answers:
            staged = seal_tiny_version(tmp_path / "elsewhere", EMBEDDER, NEW)
            if damage == "graph":
                replace_sealed_file(staged, GRAPH_NAME, b"no graph")
            else:
                (staged / (GRAPH_NAME if damage == "digest" else "manifest.json")).write_bytes(b"")
            staged.rename(directory)
            (directory.parent / "latest").write_text(NEW)
            is_refused = damage != "manifest"  # an invalid manifest is not probed
            async with asyncio.timeout(TIMEOUT_S):
                while len(answers) == 0 or is_refused > (
                    NEW in read_plan(tmp_path).find(EMBEDDER).refused
                ):
                    await asyncio.sleep(0.01)
            assert await ask(http) == old
        assert set(answers) == {old}
        assert (await http.post(f"{URL}@{NEW}", json=BODY)).status_code >= 500
    if damage != "manifest":
        async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
            assert await ask(http) == old, "a new process reads the refusal from the plan"


async def test_version_that_fails_for_a_moment_is_tried_again(
    tmp_path: Path, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.failed_loads.MIN_QUARANTINE_S", 0.0)
    monkeypatch.setattr("deployments.replicas.failed_loads.MAX_QUARANTINE_S", 0.0)
    damaged = iter([True])
    check = manifest.check_file

    def check_file(directory: Path, *arguments: object) -> None:
        if directory.name == NEW and next(damaged, False):
            raise OSError(errno.EIO, "Input/output error")
        check(directory, *arguments)

    monkeypatch.setattr(manifest, "check_file", check_file)
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        assert await ask(http) == old
        seal_tiny_version(tmp_path, EMBEDDER, NEW)
        assert await ask_until(http, NEW) == {old}
    assert next(damaged, None) is None, "it was damaged once"
    assert not read_plan(tmp_path).find(EMBEDDER).refused


@pytest.mark.parametrize("damage", ["graph", "digest", "manifest"])
@pytest.mark.parametrize("is_configured", [False, True])
async def test_version_that_no_name_had_before_is_tried_at_its_first_request(
    tmp_path: Path, old: str, damage: str, is_configured: bool
) -> None:
    broken = seal_tiny_version(tmp_path, EMBEDDER, NEW)
    if damage == "graph":
        replace_sealed_file(broken, GRAPH_NAME, b"no graph")
    else:
        (broken / (GRAPH_NAME if damage == "digest" else "manifest.json")).write_bytes(b"")
    models = (EMBEDDER,) if is_configured else ()
    async with InProcess(tmp_path, models=models).client() as http:
        assert {await ask(http) for _ in range(3)} == {old}
        assert await asyncio.gather(*(ask(http, f"{URL}@latest") for _ in range(8))) == [old] * 8
        assert (await http.post(f"{URL}@{NEW}", json=BODY)).status_code >= 500
    # Digests of configured models are already checked at the start, which records no refusal.
    is_refused = damage == "graph" or (damage == "digest" and not is_configured)
    assert (NEW in read_plan(tmp_path).find(EMBEDDER).refused) is is_refused


@pytest.mark.parametrize(("path", "body"), GENERATOR_CALLS)
async def test_first_request_to_a_generator_tries_the_version(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    old = seal_tiny_decoder(tmp_path, version="aaaaaaaaaaa1").name
    broken = seal_tiny_decoder(tmp_path, version=NEW)
    replace_sealed_file(broken, DECODER_GRAPH, b"no graph")
    writes = GeneratorSettings(kv_slots=2, max_context_tokens=200)
    async with InProcess(tmp_path, models=(), writes=writes).client() as http:
        response = await http.post(f"/models/{DECODER}{path}", json=body)
    assert (response.status_code, response.headers.get("x-sha")) == (200, old), response.text
    assert NEW in read_plan(tmp_path).find(DECODER).refused


async def wait_forever(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("path", "body"), GENERATOR_CALLS)
async def test_first_request_to_a_generator_keeps_its_deadline(
    tmp_path: Path, path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("aaaaaaaaaaa1", NEW):
        seal_tiny_decoder(tmp_path, version=version)
    monkeypatch.setattr(GenerationExecutor, "load", wait_forever)
    monkeypatch.setattr(version_trials, "MAX_WAIT_S", 2 * TIMEOUT_S)
    writes = GeneratorSettings(kv_slots=2, max_context_tokens=200)
    async with (
        InProcess(tmp_path, models=(), writes=writes).client() as http,
        asyncio.timeout(TIMEOUT_S),
    ):
        response = await http.post(
            f"/models/{DECODER}{path}", json={**body, "options": {"deadline_ms": 100}}
        )
    assert response.status_code == 504, response.text
    assert "a new version of the model loads" in response.text


async def test_setting_that_is_too_small_refuses_no_version(tmp_path: Path) -> None:
    for version in ("aaaaaaaaaaa1", NEW):
        seal_tiny_decoder(tmp_path, version=version)
    writes = GeneratorSettings(kv_cache_bytes=1_000)
    async with InProcess(tmp_path, models=(), writes=writes).client() as http:
        response = await http.post(f"/models/{DECODER}/generate", json={"inputs": "a"})
    assert response.json()["code"] == "requirement_missing"
    assert "`kv_cache_bytes` is 1000" in response.json()["error"]
    assert not read_plan(tmp_path).find(DECODER).refused


async def test_first_request_with_tensors_tries_the_version(tmp_path: Path, old: str) -> None:
    replace_sealed_file(seal_tiny_version(tmp_path, EMBEDDER, NEW), GRAPH_NAME, b"no graph")
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["good film"]}
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        response = await http.post(f"/v2/models/{EMBEDDER}/infer", json={"inputs": [tensor]})
    assert (response.status_code, response.headers.get("x-sha")) == (200, old), response.text
    assert response.json()["model_version"] == old
    assert NEW in read_plan(tmp_path).find(EMBEDDER).refused


@pytest.mark.parametrize("change", [{"inputs": []}, {"parameters": {"task": "poetry"}}])
async def test_invalid_request_with_tensors_tries_no_version(
    tmp_path: Path, old: str, change: dict[str, object]
) -> None:
    replace_sealed_file(seal_tiny_version(tmp_path, EMBEDDER, NEW), GRAPH_NAME, b"no graph")
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["good film"]}
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        response = await http.post(
            f"/v2/models/{EMBEDDER}/infer", json={"inputs": [tensor], **change}
        )
    assert response.status_code == 400, response.text
    assert not read_plan(tmp_path).find(EMBEDDER).refused


async def test_only_version_is_not_tried(tmp_path: Path, old: str) -> None:
    (model_directory(tmp_path, EMBEDDER) / old / GRAPH_NAME).write_bytes(b"")
    async with InProcess(tmp_path, models=()).client() as http:
        assert (await http.post(URL, json=BODY)).status_code >= 500
    assert not read_plan(tmp_path).find(EMBEDDER).refused


async def test_split_has_its_share_and_each_client_one_version(tmp_path: Path, old: str) -> None:
    seal_tiny_version(tmp_path, EMBEDDER, NEW)
    changes.promote(tmp_path, EMBEDDER, old)
    changes.set_split(tmp_path, EMBEDDER, NEW, 10)
    clients = [f"10.0.{number // 250}.{number % 250}" for number in range(600)]
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        first = [await ask(http, client=client) for client in clients]
        again = [await ask(http, client=client) for client in clients[:100]]
    assert first[:100] == again
    assert first.count(NEW) / len(clients) == pytest.approx(0.10, abs=0.035)


async def test_split_holds_for_requests_without_a_model(tmp_path: Path, old: str) -> None:
    seal_tiny_version(tmp_path, EMBEDDER, NEW)
    changes.promote(tmp_path, EMBEDDER, old)
    changes.set_split(tmp_path, EMBEDDER, NEW, 50)
    clients = [f"10.0.0.{number}" for number in range(60)]
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        named = [await ask(http, client=client) for client in clients]
        unnamed = [await ask(http, url="/", client=client) for client in clients]
    assert unnamed == named
    assert set(named) == {old, NEW}


async def test_shadow_computes_again_and_never_answers(tmp_path: Path, old: str) -> None:
    seal_tiny_version(tmp_path, EMBEDDER, NEW)
    changes.promote(tmp_path, EMBEDDER, old)
    changes.set_shadow(tmp_path, EMBEDDER, NEW, 100)
    server = InProcess(tmp_path, models=(EMBEDDER,))
    async with server.client() as http:
        assert {await ask(http) for _ in range(5)} == {old}
        async with asyncio.timeout(TIMEOUT_S):
            while not (counts := server.pipeline.shadows.comparisons) or (
                next(iter(counts.values())).total < 5
            ):
                await asyncio.sleep(0.01)
        (comparison,) = counts.values()
        assert (comparison.differed, comparison.failed) == (5, 0), "the versions differ in weights"
        (model_directory(tmp_path, EMBEDDER) / NEW / GRAPH_NAME).write_bytes(b"")
        assert await ask(http) == old


async def compare_with_shadow(server: InProcess, http: httpx.AsyncClient) -> Comparison:
    """Send a request and wait until its shadow is compared."""
    await ask(http)
    async with asyncio.timeout(TIMEOUT_S):
        while not (counts := server.pipeline.shadows.comparisons):
            await asyncio.sleep(0.01)
        (comparison,) = counts.values()
        while not comparison.total:
            await asyncio.sleep(0.01)
    return comparison


@pytest.mark.parametrize("prompts", [{}, {"query": "bad river "}])
async def test_shadow_computes_what_it_would_answer_itself(
    tmp_path: Path, old: str, prompts: dict[str, str]
) -> None:
    fields = {"prompts": prompts, "default_prompt": next(iter(prompts), None)}
    seal_tiny_version(tmp_path, EMBEDDER, NEW, same_weights=True, **fields)
    changes.promote(tmp_path, EMBEDDER, old)
    changes.set_shadow(tmp_path, EMBEDDER, NEW, 100)
    server = InProcess(tmp_path, models=(EMBEDDER,))
    async with server.client() as http:
        comparison = await compare_with_shadow(server, http)
    assert (comparison.differed, comparison.agreed) == ((1, 0) if prompts else (0, 1))


async def test_version_without_a_graph_for_this_cluster_leaves_the_former_one(
    tmp_path: Path, old: str
) -> None:
    (gpu,) = (each for each in tiny_manifest(EMBEDDER).candidates if each.device is Device.GPU)
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as running:
        assert await ask(running) == old
        seal_tiny_version(tmp_path, EMBEDDER, NEW, candidates=(gpu,))
        async with InProcess(tmp_path, models=(EMBEDDER,)).client() as started:
            for http in (running, started):
                assert {await ask(http) for _ in range(3)} == {old}
