"""Tests of the playground page: its files, its content security policy, and model reports."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import orjson
import pytest

from deployments.artifacts.store import HOSTS_NAME
from deployments.ingress.apis.playground.routes import ASSETS, INDEX, PAGE, POLICY
from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.in_process import InProcess

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
MAX_PAGE_BYTES = 300_000
ADDRESS = re.compile(r"""(?:src|href)="([^"#]+)"|(?:from|import) "([^"]+)"|\burl\(([^)]+)\)""")
STAGES = {"metric": None, "measured_at": "2026-01-01", "stages": [], "unmeasured": {}}


async def test_browsers_get_the_page_and_clients_the_health(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        page = await http.get("/", headers=BROWSER)
        health = await http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert health.json() == {"status": "ok"}
    assert page.headers["vary"] == health.headers["vary"] == "accept"


async def test_page_loads_files_of_this_server_only(tiny_store: Path) -> None:
    known = {"/docs", "/openapi.json", *(f"/page/{name}" for name in ASSETS)}
    async with InProcess(tiny_store).client() as http:
        assert (await http.get("/", headers=BROWSER)).status_code == 200
        for name in ASSETS:
            answer = await http.get(f"/page/{name}")
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"] == POLICY
            assert (await http.get(f"/page/{name}/")).content == answer.content
    for name in (INDEX, *ASSETS):
        for groups in ADDRESS.findall((PAGE / name).read_text(encoding="utf-8")):
            base = "/" if name == INDEX else "/page/"
            address = str(httpx.URL(base).join("".join(groups)))
            assert address in known, f"{name} loads {address}"


def test_every_module_is_loaded_with_the_document() -> None:
    index = (PAGE / INDEX).read_text(encoding="utf-8")
    for name in ASSETS:
        assert f'"page/{name}"' in index, name


@pytest.mark.parametrize("prefix", ["", "/below/it"])
async def test_page_loads_its_files_below_the_prefix(prefix: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).application() as app:
        transport = httpx.ASGITransport(app, root_path=prefix)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            page = await http.get(f"{prefix}/", headers=BROWSER)
            if prefix:
                redirect = await http.get(prefix, headers=BROWSER)
                assert redirect.url.join(redirect.headers["location"]) == page.url
                assert (await http.get(prefix)).json() == {"status": "ok"}
            addresses = ["".join(groups) for groups in ADDRESS.findall(page.text)]
            assert len(addresses) > len(ASSETS)
            for address in addresses:
                loaded = page.url.join(address)
                assert loaded.path.startswith(f"{prefix}/"), address
                assert (await http.get(loaded)).status_code == 200


def test_policy_permits_no_inline_script_and_no_other_host() -> None:
    policy = dict(part.strip().split(" ", 1) for part in POLICY.split(";"))
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert {word for words in policy.values() for word in words.split()} == {
        "'self'",
        "'none'",
        "data:",
    }
    index = (PAGE / INDEX).read_text(encoding="utf-8")
    assert "style=" not in index
    assert not re.search(r"\son\w+=|<script>", index)


def test_page_is_small() -> None:
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < MAX_PAGE_BYTES


@pytest.mark.parametrize("path", ["/page/index.html", "/page/..%2froutes.py", "/page/"])
async def test_other_files_are_not_served(path: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        assert (await http.get(path)).status_code == 404


async def test_report_has_candidates_and_the_latest_stage_table(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, EMBEDDER)
    async with InProcess(tmp_path, models=(EMBEDDER,)).client() as http:
        unmeasured = (await http.get(f"/models/{EMBEDDER}/report")).json()
        for host in ("first", "second"):
            (directory / HOSTS_NAME / host).mkdir(parents=True)
            path = directory / HOSTS_NAME / host / "report.json"
            path.write_bytes(orjson.dumps({**STAGES, "measured_at": host, "conditions": {}}))
        measured = (await http.get(f"/models/{EMBEDDER}/report")).json()
        path.write_bytes(b'{"stages": ')
        damaged = (await http.get(f"/models/{EMBEDDER}/report")).json()
    assert unmeasured["stages"] is unmeasured["generation"] is None
    assert unmeasured["candidates"][0]["size_bytes"] > 0
    assert measured["stages"] == {**STAGES, "measured_at": "second"}
    assert damaged["stages"] is None


async def test_report_of_an_unknown_model_is_404(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        assert (await http.get("/models/nobody/nothing/report")).status_code == 404
