"""Management of models in the page: pull, load and unload, and keys without these rights."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from deployments.builds.queue import BuildClaim
from deployments.builds.record import BuildState
from deployments.config import BuildSettings, IngressUserConfig
from deployments.ingress import builds
from deployments.keys.key import Scope
from tests.support.artifacts import EMBEDDER, seal_tiny_version
from tests.support.browser import Visitor
from tests.support.fake_builds import FakeBuilder, fail, seal_at_once
from tests.support.http_server import serve_http
from tests.support.in_process import InProcess
from tests.support.keys import add_key

VERSIONS = ("0123456789ab", "ba9876543210")
PULLS = IngressUserConfig(builds=BuildSettings(allow_pull=True))
STEP_S = 300.0  # maximum wait of the fake build for the test


class SteppedBuilder(FakeBuilder):
    """A fake builder that stays in the state `building` until the test releases `steps`."""

    def __init__(self) -> None:
        super().__init__(self._work)
        self.steps = threading.Semaphore(0)
        self.fails = False

    def _work(self, store: Path, claim: BuildClaim) -> None:
        claim.enter(BuildState.BUILDING, "export of a test")
        assert self.steps.acquire(timeout=STEP_S)
        fail(store, claim) if self.fails else seal_at_once(store, claim)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for version in VERSIONS:
        seal_tiny_version(tmp_path, EMBEDDER, version)
    return tmp_path


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> SteppedBuilder:
    monkeypatch.setattr(builds, "has_compiler", lambda: True)
    return SteppedBuilder()


@pytest.fixture
def operator(browser: Browser, store: Path, builder: SteppedBuilder) -> Iterator[Visitor]:
    """A tab of a server without keys and without models in its configuration."""
    server = InProcess(store, models=(), settings=PULLS, start_builder=builder)
    with serve_http(server) as running:
        visitor = Visitor.arrive(browser, running.url)
        yield visitor
        visitor.leave()


def pull(visitor: Visitor, source: str) -> None:
    page = visitor.page
    if not page.get_by_label("Source").is_visible():
        page.get_by_text("Pull a model").click()
    page.get_by_label("Source").fill(source)
    page.get_by_role("button", name="Pull").click()


def test_pull_is_followed_until_the_model_can_be_used(
    operator: Visitor, builder: SteppedBuilder
) -> None:
    page = operator.open("models")
    pull(operator, "acme/first")
    progress = page.locator(".progress")
    expect(progress).to_contain_text("acme/first: building, export of a test")
    builder.steps.release()
    expect(page.locator("article h2", has_text="acme/first")).to_be_visible()
    # The second build has a percentage, estimated from the durations of the first build.
    pull(operator, "acme/second")
    percent = progress.get_by_role("progressbar")
    expect(percent).to_have_attribute("aria-valuenow", re.compile(r"^\d+$"))
    operator.snap("pull-progress")
    # The end of the build does not reset a view that was opened during the build.
    page.locator("article").get_by_role("link", name="Embeddings", exact=True).first.click()
    operator.fill({"Texts": "A cat.\nA film."})
    operator.run()
    texts = page.get_by_role("textbox", name="Texts")
    texts.fill("A city.")
    builder.steps.release()
    models = page.get_by_label("Model", exact=True).first.locator("option")
    expect(models).to_have_text([re.compile("^acme/first"), re.compile("^acme/second"), EMBEDDER])
    expect(texts).to_have_value("A city.")
    expect(texts).to_be_focused()
    expect(page.locator("svg.map").first).to_be_visible()
    page = operator.open("models")
    expect(page.locator("article", has_text="acme/second")).to_contain_text("ready")


def test_failed_pull_says_why(operator: Visitor, builder: SteppedBuilder) -> None:
    builder.fails = True
    page = operator.open("models")
    pull(operator, "acme/broken")
    builder.steps.release()
    expect(page.locator(".progress .problem")).to_contain_text("`model.safetensors` is corrupt")
    operator.snap("pull-failed")


def test_model_is_loaded_and_unloaded(operator: Visitor) -> None:
    page = operator.open("models")
    card = page.locator("article", has_text=EMBEDDER)
    expect(card).to_contain_text("not loaded")
    card.get_by_role("button", name="load", exact=False).first.click()
    memory = card.locator("div", has=page.locator("dt", has_text="In memory")).last
    expect(memory).to_contain_text("CpuEncoder")
    operator.snap("model-loaded")
    card.get_by_role("button", name="unload").click()
    expect(memory).to_contain_text("not loaded")
    page.route(f"**/models/{EMBEDDER}/versions", give_small_share)
    card.get_by_text("Versions").click()
    expect(page.locator(".versions li")).to_have_count(2)
    expect(page.locator(".versions li").first).to_contain_text(" 0.4 % of the requests")
    expect(page.locator(".versions li").first).to_contain_text(re.compile(r"\d [kM]?B,"))


def test_failed_load_is_said_beside_its_button_until_the_next(operator: Visitor) -> None:
    page = operator.open("models")
    card = page.locator("article", has_text=EMBEDDER)
    load, unload = (
        card.get_by_label(f"{action} {EMBEDDER}", exact=True) for action in ("load", "unload")
    )
    page.route("**/load", lambda route: route.fulfill(status=507, json={"error": "too large"}))
    for _ in range(2):
        load.click()
        expect(card.locator(".problem")).to_contain_text("too large")
    expect(card.locator(".problem")).to_have_count(1)
    expect(load).to_be_focused()
    unload.click()
    expect(card.locator(".problem")).to_be_hidden()
    expect(unload).to_be_focused()
    operator.console.clear()  # remove the expected errors


def give_small_share(route: Route) -> None:
    reply = route.fetch()
    body = reply.json()
    body["versions"][0]["percent"] = 0.4
    route.fulfill(response=reply, json=body)


def test_key_that_only_uses_models_chooses_versions_and_manages_nothing(
    browser: Browser, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key_file = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(key_file, scopes=(Scope.INFER,))
    settings = IngressUserConfig(key_file=key_file)
    with serve_http(InProcess(store, models=(EMBEDDER,), settings=settings)) as server:
        visitor = Visitor.arrive(browser, server.url)
        visitor.page.add_init_script(f"sessionStorage.setItem('hundredfold.key', '{key}')")
        page = visitor.open("play/feature-extraction")
        version = page.get_by_label("Version").first
        expect(version.locator("option")).to_have_count(2)
        expect(version.locator("option").nth(1)).to_contain_text("fp32 tiny, ")
        name = version.locator("option").nth(1).get_attribute("value")
        version.select_option(name)
        visitor.fill({"Texts": "A cat.\nA film."})
        expect(page.locator("#code-panel")).to_contain_text(f"/models/{EMBEDDER}@{name}")
        visitor.run()
        expect(page.locator("svg.map").first).to_be_visible()
        expect(page.locator(".facts")).to_contain_text(f"Version {name}")
        page = visitor.open("models")
        expect(page.locator("main")).to_contain_text("it needs the scope admin")
        expect(page.get_by_role("button", name="unload")).to_have_count(0)
        expect(page.get_by_text("Versions")).to_be_hidden()
        visitor.leave()
