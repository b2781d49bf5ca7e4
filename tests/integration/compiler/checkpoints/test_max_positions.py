"""Maximum of tokens that a config allows."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2Config

from build_artifacts.checkpoints.architectures import read_max_positions


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}, 192),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_yarn_extends_the_context(rope: dict[str, Any], tokens: int) -> None:
    config = Qwen2Config(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **rope})
    assert read_max_positions(config) == tokens
