"""The system's Chromium, and measurements of one tab."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from playwright.sync_api import Browser, Page, sync_playwright

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")
SETTLE_MS = 300.0  # time for the page to show the last responses
POLLS_PER_MINUTE = 30  # requests per minute that the view `status` sends
WARM_UP_MINUTES = 10  # minutes until charts have all points and V8 has compiled the code
SPEED = 1_000  # factor by which the page's timers run faster; requests take their real time
FIRST_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
# Script that records the elements of layout shifts without recent input (https://web.dev/cls).
OBSERVE_SHIFTS = """() => {
  window.shifted = [];
  const note = (entry) => entry.sources.forEach(({node}) => window.shifted.push(node?.className));
  new PerformanceObserver((list) => {
    list.getEntries().filter((entry) => !entry.hadRecentInput).forEach(note);
  }).observe({type: "layout-shift", buffered: false});
}"""
_POLLED = "**/stats"
_FAST_TIMERS = (
    "const after = setTimeout;"
    f"window.setTimeout = (call, ms, ...more) => after(call, ms / {SPEED}, ...more);"
)


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, EXECUTABLES)), None)


@contextmanager
def open_browser(host: str = "127.0.0.1") -> Iterator[Browser]:
    """Start the system's Chromium. Playwright's own builds are not downloaded.

    The browser reaches only `host`, a name or an IP address without brackets.
    """
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root in a container, so it is off.
        browser = playwright.chromium.launch(
            executable_path=find_browser(),
            args=[
                "--no-sandbox",
                "--disable-dev-shm-usage",
                f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {host}",
            ],
        )
        try:
            yield browser
        finally:
            browser.close()


def read_first_paint_ms(page: Page) -> float:
    """Wait for the first paint of a loading page. Return the ms since the navigation."""
    page.wait_for_function(FIRST_PAINT)
    return cast(float, page.evaluate(FIRST_PAINT))


class OpenStatus:
    """The page's view `status` in a tab that stays open for minutes.

    Requests go to the real server. Unless `real_time` is set, the page's timers run SPEED times
    faster, so that minutes pass in seconds.
    """

    def __init__(self, page: Page, url: str, *, real_time: bool = False) -> None:
        self._page = page
        self._polls = 0
        if not real_time:
            page.add_init_script(_FAST_TIMERS)
        page.on("requestfinished", lambda request: self._count(request.url))
        page.goto(f"{url}/#/status")
        self._session = page.context.new_cdp_session(page)

    def read_bytes_after(self, minutes: float) -> int:
        """Return the bytes of live JavaScript objects when the tab has been open for `minutes`.

        Count the minutes by the page's requests, because the page's timers may run fast. Hold back
        the next request while the heap is read, because its answer would add objects.
        """
        while self._polls < minutes * POLLS_PER_MINUTE:
            self._page.wait_for_timeout(50)
        self._page.route(_POLLED, lambda _route: None)
        self._page.wait_for_timeout(SETTLE_MS)
        self._session.send("HeapProfiler.collectGarbage")
        used = int(self._session.send("Runtime.getHeapUsage")["usedSize"])
        self._page.unroute(_POLLED)  # lets the waiting request continue
        return used

    def _count(self, url: str) -> None:
        self._polls += url.endswith("/stats")
