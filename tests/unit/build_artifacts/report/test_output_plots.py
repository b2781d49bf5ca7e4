from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest

from build_artifacts.report.output import draw_plots
from build_artifacts.report.values import Report
from tests.support.report_samples import STAGES, report_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of()


def test_plot_returns_png_and_svg(report: Report) -> None:
    from matplotlib.image import imread

    drawn = draw_plots(report)
    pixels = imread(io.BytesIO(drawn["png"]), format="png")
    height, width = pixels.shape[:2]
    assert width > height > 400
    assert pixels[..., :3].std() > 0.05  # not a uniform image
    root = ElementTree.fromstring(drawn["svg"])
    assert root.tag == f"{SVG}svg"
    assert len(list(root.iter(f"{SVG}path"))) > 20


def test_plot_is_deterministic(report: Report) -> None:
    assert draw_plots(report) == draw_plots(Report.model_validate_json(report.to_json()))


def test_plot_without_baseline_has_no_speedup_axes() -> None:
    with_bars, without = (draw_plots(report_of(*stages))["svg"] for stages in (STAGES, STAGES[1:]))
    assert b'id="axes_2"' in with_bars
    assert b'id="axes_2"' not in without
