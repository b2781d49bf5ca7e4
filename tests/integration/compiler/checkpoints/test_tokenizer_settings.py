"""Settings of the tokenizer that the metadata of a checkpoint follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build_artifacts.checkpoints.metadata import has_token_types
from build_artifacts.errors import UnsupportedModel
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.tiny_encoders import tiny_checkpoint, write_json


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, True),
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        ({"tokenizer_class": "TokenizersBackend"}, False),
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        (
            {
                "tokenizer_class": "TokenizersBackend",
                "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            },
            True,
        ),
    ],
)
def test_token_types_are_those_of_the_tokenizer_class(
    tmp_path: Path, config: dict[str, object], expected: bool
) -> None:
    write_json(tmp_path / "tokenizer_config.json", config)
    assert has_token_types(tmp_path) is expected


@pytest.mark.parametrize(
    ("stated", "direction", "side"),
    [
        (None, None, "right"),
        (None, "Left", "left"),
        ("left", None, "left"),
        ("right", "Left", "right"),
    ],
)
def test_truncated_side_comes_from_the_tokenizer(
    tmp_path: Path, stated: str | None, direction: str | None, side: str
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, labels=("NO", "YES"))
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_bytes())
    truncation = direction and {"direction": direction, "max_length": 8}
    write_json(checkpoint / "tokenizer.json", tokenizer | {"truncation": truncation})
    write_json(checkpoint / "tokenizer_config.json", {"truncation_side": stated})
    assert read_checkpoint_metadata(checkpoint).truncation_side == side
    write_json(checkpoint / "tokenizer_config.json", {"truncation_side": "both"})
    with pytest.raises(UnsupportedModel, match="the side of the truncation is `both`"):
        read_checkpoint_metadata(checkpoint)
