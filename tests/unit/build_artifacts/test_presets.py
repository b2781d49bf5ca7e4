"""Quantization methods and accuracy gates of the search presets."""

from __future__ import annotations

import pytest

from build_artifacts.presets import SEARCH_PRESETS
from build_artifacts.recipes import DynamicInt8, SmoothedInt8
from deployments.engines import ENGINES


def test_engines_of_all_candidates_are_registered() -> None:
    presets = SEARCH_PRESETS.values()
    engines = {each.engine for preset in presets for each in (*preset.candidates, preset.fallback)}
    assert engines <= ENGINES.keys()


def test_only_the_dynamic_preset_has_ranges_that_depend_on_the_batch() -> None:
    presets = {
        name
        for name, preset in SEARCH_PRESETS.items()
        for candidate in (*preset.candidates, preset.fallback)
        if isinstance(candidate.quantization, DynamicInt8)
    }
    assert presets == {"dynamic"}


@pytest.mark.parametrize("name", sorted(SEARCH_PRESETS.keys() - {"dynamic"}))
def test_presets_start_with_smoothed_int8_and_compare_batched_answers(name: str) -> None:
    preset = SEARCH_PRESETS[name]
    assert isinstance(preset.candidates[0].quantization, SmoothedInt8)
    assert preset.gate.batched_cosine_worst >= 0.999
    assert preset.gate.batched_top1_agreement == 1
    assert preset.gate.metric_drop <= 0.3
