"""All views of the page: keyboard, screen readers, phones, color schemes, keys, a lost server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from benchmarks.page.browser import read_first_paint_ms
from deployments.config import IngressUserConfig
from tests.support.artifacts import EMBEDDER
from tests.support.browser import (
    INPUTS,
    PAGE_MODELS,
    PHONE,
    Visitor,
    find_accessibility_problems,
)
from tests.support.http_server import HttpServer, serve_http
from tests.support.in_process import InProcess
from tests.support.keys import add_key

VIEWS = (
    "play/question-answering",
    "play/chat",
    "play/feature-extraction",
    "demo",
    "models",
    "status",
)
AXE_VIEWS = tuple(dict.fromkeys((*VIEWS, *(f"play/{task}" for task in INPUTS), "play/completion")))
DOCUMENT = {
    "openapi": "3.1.0",
    "info": {"title": "One route", "version": "1"},
    "paths": {"/health": {"get": {"responses": {"200": {"description": "OK"}}}}},
}
MODEL_LIST = re.compile(r"/v1/models\?limit=")
PAUSED_AT_S = 600.0  # later than any test has run when it pauses its clock
FOCUSED = "() => document.activeElement.textContent.trim() || document.activeElement.name"


@pytest.fixture
def phone(browser: Browser, server: HttpServer) -> Iterator[Visitor]:
    visitor = Visitor.arrive(browser, server.url, viewport=PHONE, has_touch=True, is_mobile=True)
    yield visitor
    visitor.leave()


@pytest.fixture(scope="module")
def axe_visitor(browser: Browser, server: HttpServer) -> Iterator[Visitor]:
    """One tab for all views, so that it loads the accessibility checker axe only once."""
    visitor = Visitor.arrive(browser, server.url, bypass_csp=True)
    yield visitor
    visitor.leave()


def test_first_paint_waits_for_no_module(
    visitor: Visitor, record_property: Callable[[str, object], None]
) -> None:
    """HTML and CSS suffice for the first paint. The test report records its time."""
    visitor.page.route("**/page/main.js", lambda route: None)
    visitor.page.goto(visitor.url, wait_until="commit")
    record_property("first_paint_ms", read_first_paint_ms(visitor.page))
    expect(visitor.page.get_by_role("link", name="Playground")).to_be_visible()


@pytest.mark.parametrize("view", AXE_VIEWS)
def test_axe_finds_nothing_serious(axe_visitor: Visitor, view: str) -> None:
    page = axe_visitor.open(view)
    task = view.removeprefix("play/")
    if view == "demo":
        axe_visitor.fill(INPUTS["question-answering"])
        page.get_by_role("button", name="Ask them all").click()
        expect(page.locator(".passage mark")).to_be_visible()
    elif task in INPUTS:
        axe_visitor.fill(INPUTS[task])
        axe_visitor.run()
    for options in page.locator("main details").all():
        options.evaluate("e => { e.open = true }")
    # The dark scheme changes colors only, so one rule suffices for it.
    for scheme, rules in (("light", None), ("dark", ["color-contrast"])):
        page.emulate_media(color_scheme=scheme)
        assert find_accessibility_problems(page, rules) == [], scheme
        axe_visitor.snap(f"{view.replace('/', '-')}-{scheme}")


def test_question_is_asked_with_the_keyboard_only(visitor: Visitor) -> None:
    page = visitor.open()
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED) == "Skip to the content"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED) == "question":
            break
    page.keyboard.press("Control+A")
    page.keyboard.type("Was it good?")
    page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("The food was good.")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".passage mark")).to_be_visible()
    expect(page.locator("#announcer")).to_contain_text("Answered in")


def test_focus_follows_the_view(visitor: Visitor) -> None:
    page = visitor.open()
    page.get_by_role("link", name="Models").press("Enter")
    expect(page.locator("main h1")).to_be_focused()
    expect(page.get_by_role("link", name="Models")).to_have_attribute("aria-current", "page")
    expect(page).to_have_title(re.compile("^Models"))
    page.get_by_role("link", name="Skip to the content").press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page).to_have_title(re.compile("^Models"))
    assert page.url.endswith("/#/models")


@pytest.mark.parametrize("view", VIEWS)
def test_phone_needs_no_sideways_scrolling(phone: Visitor, view: str) -> None:
    page = phone.open(view)
    if view == "play/feature-extraction":
        phone.fill(INPUTS["feature-extraction"])
        phone.run()
    page.wait_for_function("() => !document.querySelector('main').textContent.includes('Loading')")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    phone.snap(f"phone-{view.replace('/', '-')}")


def test_color_scheme_is_switched_and_kept(visitor: Visitor) -> None:
    page = visitor.open()
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    switch = page.get_by_role("button", name="Color scheme")
    switch.click()
    assert page.evaluate(ground) == light
    switch.click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    expect(page.locator("main h1")).to_be_visible()
    assert page.evaluate(ground) == dark


def test_key_is_asked_for_and_kept_in_the_session_only(
    browser: Browser, page_store: Path, tmp_path: Path
) -> None:
    key = add_key(tmp_path / "keys.json")
    settings = IngressUserConfig(key_file=tmp_path / "keys.json")
    with serve_http(InProcess(page_store, models=PAGE_MODELS, settings=settings)) as server:
        visitor = Visitor.arrive(browser, server.url)
        page = visitor.open()
        expect(page.locator("h1")).to_have_text("A key is needed")
        visitor.snap("key-needed")
        page.get_by_role("button", name="Enter the key").click()
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("Question answering")
        visitor.fill(INPUTS["question-answering"])
        visitor.run()
        expect(page.locator(".passage mark")).to_be_visible()
        code = page.locator("#code-panel")
        expect(code).to_contain_text("Bearer $KEY")
        assert key not in page.content()
        assert key not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert key in page.evaluate("JSON.stringify(sessionStorage)")
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name="Forget it").click()
        expect(page.locator("h1")).to_have_text("A key is needed")
        visitor.leave()


def test_key_that_no_request_can_carry_is_not_accepted(visitor: Visitor) -> None:
    page = visitor.open()
    page.get_by_role("button", name="API key").click()
    field = page.get_by_label("Key", exact=True)
    field.fill("hk-0123\u200b4567")
    page.get_by_role("button", name="Use the key").click()
    expect(page.locator("#key-input:invalid")).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0
    page.get_by_role("button", name="Forget it").click()
    expect(field).to_be_hidden()
    page.get_by_role("button", name="API key").click()
    field.fill(" hk-01234567 ")
    page.get_by_role("button", name="Use the key").click()
    expect(field).to_be_hidden()
    assert page.evaluate("Object.values(sessionStorage)") == ["hk-01234567"]


def test_error_of_the_server_is_shown(visitor: Visitor) -> None:
    page = visitor.open("play/text-classification")
    visitor.fill({"Text": "far " * 40})
    visitor.run()
    expect(page.locator(".problem")).to_contain_text("tokens; the maximum is 16")
    visitor.snap("error")
    visitor.fill({"Text": " "})
    page.get_by_role("button", name="Classify").click()
    expect(page.locator(".problem").last).to_have_text("“Text” is empty.")


def test_lost_server_is_said_and_found_again(visitor: Visitor) -> None:
    page = visitor.open("play/text-classification")
    visitor.fill({"Text": "A cat."})
    page.context.set_offline(True)
    visitor.run()
    expect(page.locator(".problem")).to_contain_text("cannot be reached")
    page.context.set_offline(False)
    visitor.run()
    expect(page.locator(".scores li").first).to_be_visible()
    visitor.console.clear()  # remove the expected error of the request without a server


def test_retries_end_with_the_first_success(visitor: Visitor) -> None:
    page = visitor.page
    loads: list[str] = []
    page.on("requestfinished", lambda sent: loads.append(sent.url))
    page.clock.install(time=0)
    page.route(MODEL_LIST, lambda route: route.fulfill(status=503, json={"error": "starting"}))
    page.goto(f"{visitor.url}/#/play/text-classification")
    again = page.get_by_role("button", name="Try again")
    again.focus()
    with page.expect_request_finished(lambda sent: bool(MODEL_LIST.search(sent.url))):
        page.clock.pause_at(PAUSED_AT_S)  # from here on, no retry starts by itself
    expect(page.get_by_role("heading", name="No list of models")).to_be_visible()
    expect(again).to_be_focused()  # the retry has failed in the same way
    page.unroute(MODEL_LIST)
    with page.expect_request_finished(lambda sent: bool(MODEL_LIST.search(sent.url))):
        again.click()
    visitor.fill({"Text": "A cat."})
    loads.clear()
    page.clock.run_for(10_000)
    visitor.run()
    assert [url for url in loads if MODEL_LIST.search(url)] == []
    expect(page.get_by_role("textbox", name="Text")).to_have_value("A cat.")


def test_task_of_the_address_is_opened_once_a_model_can_do_it(visitor: Visitor) -> None:
    page = visitor.page

    def only_embedder(route: Route) -> None:
        answer = route.fetch()
        models = [one for one in answer.json()["data"] if one["id"] == EMBEDDER]
        route.fulfill(response=answer, json={"object": "list", "data": models})

    page.route(MODEL_LIST, only_embedder)
    visitor.open("play/chat")
    expect(page.get_by_role("textbox", name="Message")).to_have_count(0)
    page.unroute_all()
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_role("textbox", name="Message")).to_be_visible()


def test_models_that_came_meanwhile_are_shown_in_the_next_view(visitor: Visitor) -> None:
    page = visitor.page
    page.route(MODEL_LIST, lambda route: route.fulfill(json={"object": "list", "data": []}))
    visitor.open("play")
    expect(page.get_by_role("heading", name="No model yet")).to_be_visible()
    page.unroute_all()
    page.get_by_role("link", name="Models").click()
    expect(page.locator("article", has_text=EMBEDDER)).to_be_visible()
    page.get_by_role("link", name="Playground").click()
    expect(page.locator("#tasks a").first).to_be_visible()


def test_page_works_below_a_prefix(browser: Browser, server: HttpServer) -> None:
    """Playwright's route acts as a proxy that removes the prefix. Other requests fail the test."""
    prefix = f"{server.url}/below/it"
    visitor = Visitor.arrive(browser, prefix)
    visitor.page.route(
        f"{prefix}/**",
        lambda route: route.continue_(url=route.request.url.replace(prefix, server.url)),
    )
    page = visitor.open("play/text-classification")
    visitor.fill({"Text": "A cat."})
    visitor.run()
    expect(page.locator(".scores li").first).to_be_visible()
    expect(page.locator("#code-panel")).to_contain_text(f"curl {prefix}/models/")
    # A document with one route, because Swagger UI needs seconds for a click if there are many.
    page.route(f"{prefix}/openapi.json", lambda route: route.fulfill(json=DOCUMENT))
    page.get_by_role("link", name="API", exact=True).click()
    page.locator(".opblock-summary").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table tbody .response-col_status")).to_have_text("200")
    visitor.leave()


def test_page_under_the_name_of_another_server_reads_nothing_of_operators(
    browser: Browser, server: HttpServer
) -> None:
    """The proxy stands for a domain of an attacker that resolves to the server."""
    visitor = Visitor.arrive(browser, "http://evil.example", proxy={"server": server.url})
    page = visitor.open("models")
    read = "fetch('/usage', {headers: {'accept-language': ''}}).then((reply) => reply.status)"
    assert page.evaluate(read) == 403
    visitor.snap("other-name")
    visitor.leave()
    visitor = Visitor.arrive(browser, server.url)
    assert visitor.open("models").evaluate(read) == 200
    visitor.leave()
