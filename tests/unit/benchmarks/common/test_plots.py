"""Axes of plots."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from benchmarks.common.plots import label_axes


@pytest.mark.parametrize("has_bars", [False, True])
def test_only_axes_with_results_have_a_legend(*, has_bars: bool) -> None:
    """A rival without answers leaves its axes empty, and matplotlib warns of an empty legend."""
    axes = Figure().subplots()
    if has_bars:
        axes.bar([0], [1.0], label="a rival")
    label_axes(axes, "x", "y")
    assert (axes.get_legend() is not None) == has_bars
