"""What is refused before a graph is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from build_artifacts.checkpoints.facts import ModelFacts
from build_artifacts.decoders.export import export_decoder
from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipe import DecoderRecipe
from build_artifacts.recipes import DECODER_FP16, DECODER_INT4
from deployments.manifest import TaskName
from tests.builders import write_json

FACTS = ModelFacts(
    tasks=(TaskName.TEXT_GENERATION,), architecture="GPT2LMHeadModel", max_tokens=48, width=96
)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (DECODER_FP16, "no fp16 graph of this family"),
        # Without it the same graph would be made and judged twice.
        (replace(DECODER_INT4, options=DECODER_INT4.other_options[0]), "k_quant_mixed"),
    ],
    ids=lambda given: given.name if isinstance(given, DecoderRecipe) else "",
)
def test_a_family_that_is_written_has_no_graphs_of_the_builder_s(
    tmp_path: Path, recipe: DecoderRecipe, sentence: str
) -> None:
    write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(UnsupportedModel, match=sentence):
        export_decoder(tmp_path, FACTS, recipe, into)
    assert list(into.iterdir()) == []
