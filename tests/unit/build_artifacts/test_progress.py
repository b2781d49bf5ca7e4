from __future__ import annotations

import io

from build_artifacts.progress import BuildProgress
from tests.support.fakes import FakeTerminal


def test_terminal_shows_how_much_of_a_build_is_done_once_that_is_known() -> None:
    for percent, shown in ((None, ""), (7, "░░░░░░░░░░   7 %"), (60, "██████░░░░  60 %")):
        screen = FakeTerminal()
        progress = BuildProgress(screen, lambda percent=percent: percent)
        progress.begin()
        with progress.step("export", "cpu-int8"):
            assert ("%" in screen.getvalue()) is (percent is not None)
            assert shown in screen.getvalue()
        progress.end()


def test_build_of_another_process_is_a_line_per_step_where_nobody_watches() -> None:
    output = io.StringIO()
    progress = BuildProgress(output, lambda: 50)
    progress.begin()
    for text in ("queued", "building export", "building export", "verifying"):
        progress.show(text)
    progress.end()
    assert output.getvalue() == "  queued\n  building export\n  verifying\n"
