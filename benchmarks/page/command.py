"""Benchmark of the web page of a running server: first paint, layout shifts, memory.

A chat answer of `--tokens` tokens streams while the browser records layout shifts. The page then
shows the live status for `--minutes`. The page's timers run fast, except with `--real-time`. All
requests go to the real server. `--picture` only writes a picture of the page.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median

from PIL import Image  # a dependency of matplotlib
from playwright.sync_api import Browser, Page, Response, ViewportSize, expect
from playwright.sync_api import Error as PlaywrightError

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import DEFAULT_URL, ServerAddress
from benchmarks.common.options import add_run_options, add_url_option
from benchmarks.common.report import Table, format_number, log_progress, publish, start_run
from benchmarks.common.statistics import Goal, require_goals
from benchmarks.page.browser import (
    OBSERVE_SHIFTS,
    WARM_UP_MINUTES,
    OpenStatus,
    find_browser,
    open_browser,
    read_first_paint_ms,
)
from deployments.terminal.command_line import positive_count

DESKTOP = ViewportSize(width=1280, height=860)
COLORS = 256  # size of the picture's palette; true color would make the file three times as large
ANSWER_MS = 120_000
MAX_FIRST_PAINT_MS = 500.0
MAX_GROWTH = 1.2
MAX_KILOBYTES = 300.0  # maximum size of all files of the page, uncompressed
PROMPT = "Write a long story about a lighthouse, its keeper and a storm."


@dataclass(frozen=True, slots=True, kw_only=True)
class PageResults:
    """Results of the benchmark, as written to the result file."""

    first_paint_ms: tuple[float, ...]  # one time per load without a cache
    file_bytes: int  # size of all files of the page, uncompressed
    files: int
    foreign_requests: int  # number of requests to other hosts in the whole run
    tokens: int  # length of the streamed answer
    shifts: int  # number of movements of elements while the answer streamed
    minutes: int
    real_time: bool
    heap_bytes: tuple[int, int]  # heap size after WARM_UP_MINUTES, and `minutes` later


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    add_url_option(parser)
    parser.add_argument("--loads", type=positive_count, default=10, metavar="N")
    parser.add_argument("--tokens", type=positive_count, default=200, metavar="N")
    parser.add_argument("--minutes", type=positive_count, default=30, metavar="N")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="let the minutes pass instead of running timers fast",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="write a picture of the page, nothing else"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results. With `--picture`, only write the picture.

    Raises BenchmarkError if the page cannot be measured, or if a goal is missed.
    """
    if find_browser() is None:
        raise BenchmarkError("no Chromium here", hint="apt-get install chromium")
    url = arguments.url.rstrip("/")
    try:
        with open_browser(ServerAddress.parse(url).host) as browser:
            if arguments.picture:
                take_picture(browser, url, arguments.picture)
                return 0
            metadata = start_run("page", arguments.command_line, arguments.seed)
            results = measure(browser, url, arguments)
    except PlaywrightError as exc:
        raise BenchmarkError(
            f"the page of {url} cannot be measured: {exc.message.splitlines()[0]}",
            hint=f"start a server with `make serve`; the default address is {DEFAULT_URL}",
        ) from exc
    goals = evaluate_goals(results)
    notes = [goal.sentence for goal in goals]
    publish(arguments, metadata, results, [build_table(results)], notes=notes)
    require_goals(goals, hint="the result file has every value")
    return 0


def measure(browser: Browser, url: str, arguments: argparse.Namespace) -> PageResults:
    foreign: list[str] = []
    loads = [load_page(open_tab(browser, url, foreign), url) for _ in range(arguments.loads)]
    paints = [paint_ms for paint_ms, _ in loads]
    sizes = loads[-1][1]
    log_progress("loaded")
    tokens, shifts = stream_answer(open_tab(browser, url, foreign), url, arguments.tokens)
    log_progress(f"streamed {tokens} tokens")
    tab = open_tab(browser, url, foreign)
    status = OpenStatus(tab, url, real_time=arguments.real_time)
    before = status.read_bytes_after(WARM_UP_MINUTES)
    after = status.read_bytes_after(WARM_UP_MINUTES + arguments.minutes)
    return PageResults(
        first_paint_ms=tuple(paints),
        file_bytes=sum(sizes),
        files=len(sizes),
        foreign_requests=len(foreign),
        tokens=tokens,
        shifts=shifts,
        minutes=arguments.minutes,
        real_time=arguments.real_time,
        heap_bytes=(before, after),
    )


def load_page(page: Page, url: str) -> tuple[float, list[int]]:
    """Load the page, then close its tab.

    Return the ms of the first paint, and the bytes of every file of the page.
    """
    files: list[Response] = []
    page.on("response", lambda response: files.append(response))
    page.goto(url)
    paint_ms = read_first_paint_ms(page)
    page.locator("main h1").wait_for()
    paths = (f"{url}/page/", f"{url}/?")
    sizes = [len(file.body()) for file in files if f"{file.url}?".startswith(paths)]
    page.context.close()
    return paint_ms, sizes


def open_tab(browser: Browser, url: str, foreign: list[str]) -> Page:
    """Open a tab without a cache. Add the URLs of requests to other hosts to `foreign`."""
    page = browser.new_context(viewport=DESKTOP).new_page()
    own = (url, "data:")
    page.on("request", lambda sent: None if sent.url.startswith(own) else foreign.append(sent.url))
    return page


def stream_answer(page: Page, url: str, tokens: int) -> tuple[int, int]:
    """Stream a chat answer. Return its tokens, and the number of movements of elements."""
    page.goto(f"{url}/#/play/chat")
    page.get_by_label("Message").fill(PROMPT)
    page.locator("form.form details").evaluate("options => { options.open = true }")
    page.get_by_label("Tokens, at most").fill(str(tokens))
    page.evaluate(OBSERVE_SHIFTS)
    page.get_by_role("button", name="Send").click()
    facts = page.locator(".turn .facts")
    expect(facts).to_contain_text("tokens", timeout=ANSWER_MS)
    written = int(facts.inner_text().partition(" tokens")[0].split()[-1])
    return written, len(page.evaluate("window.shifted"))


def take_picture(browser: Browser, url: str, path: Path) -> None:
    """Ask the page's default question. Write a PNG of the answer and its cost."""
    page = open_tab(browser, url, [])
    page.goto(f"{url}/#/play/question-answering")
    page.get_by_label("Use the cache").uncheck()
    page.locator("form.form button.primary").click()
    page.locator(".cost .total").first.wait_for(timeout=ANSWER_MS)
    page.locator("form.form button.primary").click()  # again: the first click loads the model
    page.wait_for_timeout(1_000)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.open(BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(COLORS).save(path, optimize=True)


def evaluate_goals(results: PageResults) -> list[Goal]:
    before, after = results.heap_bytes
    return [
        Goal.at_most("first paint, ms", median(results.first_paint_ms), MAX_FIRST_PAINT_MS),
        Goal.at_most("elements that moved", results.shifts, 0),
        Goal.at_most("memory after / before", after / before, MAX_GROWTH),
        Goal.at_most("size of the page, kB", results.file_bytes / 1e3, MAX_KILOBYTES),
        Goal.at_most("requests to other hosts", results.foreign_requests, 0),
    ]


def build_table(results: PageResults) -> Table:
    before, after = results.heap_bytes
    paints = results.first_paint_ms
    minutes = "minutes" if results.real_time else "accelerated minutes"
    rows = [
        [
            "first paint",
            f"{median(paints):.0f} ms, at most {max(paints):.0f} ms",
            f"{MAX_FIRST_PAINT_MS:.0f} ms",
        ],
        [f"elements that moved during {results.tokens} streamed tokens", str(results.shifts), "0"],
        [
            f"memory of the page after {results.minutes} {minutes} at the status",
            f"{before / 1e6:.2f} to {after / 1e6:.2f} MB, {after / before - 1:+.0%}",
            f"{100 * (MAX_GROWTH - 1):+.0f} %",
        ],
        [
            "size of the page",
            f"{format_number(results.file_bytes / 1e3)} kB in {results.files} files",
            f"{MAX_KILOBYTES:.0f} kB",
        ],
        ["requests to other hosts", str(results.foreign_requests), "0"],
    ]
    return Table("page", ("measured", "value", "limit"), rows)
