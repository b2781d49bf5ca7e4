"""Maximum of tokens that a config allows, and the class that it names."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import BloomConfig, Mamba2Config, MptConfig, PreTrainedConfig, Qwen2Config

from build_artifacts.checkpoints.architectures import read_architecture, read_max_positions


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


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (BloomConfig(), 2048),
        (BloomConfig(seq_length=512), 512),
        (Mamba2Config(), 2048),
        (Mamba2Config(max_position_embeddings=4096), 4096),
        (MptConfig(max_seq_len=8192), 8192),
    ],
)
def test_model_without_positions_has_the_limit_of_its_training(
    config: PreTrainedConfig, tokens: int
) -> None:
    assert read_max_positions(config) == tokens


def test_class_in_the_code_of_a_checkpoint_is_that_of_transformers() -> None:
    assert read_architecture(MptConfig(architectures=["MPTForCausalLM"])) == "MptForCausalLM"
