"""Buckets of a graph: the input shapes of its recipe, limited by the head and texts of a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from build_artifacts.encoders.candidates import build_graph_spec
from build_artifacts.presets import GPU_FP16_BOUND, GPU_FP16_COMPILED, OPENVINO_INT8
from build_artifacts.recipes import CandidateRecipe
from deployments.artifacts.types import Device, ModelHead
from deployments.engines.base import limit_pass_tokens


def buckets_of(
    recipe: CandidateRecipe, head: ModelHead, max_tokens: int = 512, output_width: int = 30_522
) -> tuple[tuple[int, int], ...]:
    metadata = SimpleNamespace(
        head=head, max_tokens=max_tokens, mask_token=None, output_width=output_width
    )
    prepared: Any = SimpleNamespace(metadata=metadata)
    return build_graph_spec(recipe, Path("graph.onnx"), prepared).options.buckets


def test_largest_shape_of_a_gpu_is_captured_first() -> None:
    areas = [items * tokens for items, tokens in buckets_of(GPU_FP16_BOUND, ModelHead.VECTOR)]
    assert areas[0] == max(areas) == 4_096


@pytest.mark.parametrize("head", [ModelHead.MASKS, ModelHead.SPARSE])
def test_vocabulary_scores_on_a_gpu_have_buckets_of_few_items(head: ModelHead) -> None:
    assert max(items for items, _ in buckets_of(GPU_FP16_BOUND, ModelHead.VECTOR)) == 128
    assert max(items for items, _ in buckets_of(GPU_FP16_BOUND, head)) == 8
    on_cpu = buckets_of(OPENVINO_INT8, head)
    assert on_cpu == buckets_of(OPENVINO_INT8, ModelHead.VECTOR)


@pytest.mark.parametrize(
    "recipe", [GPU_FP16_BOUND, GPU_FP16_COMPILED], ids=lambda recipe: recipe.name
)
def test_buckets_of_a_sparse_encoder_fit_the_limit_of_a_pass(recipe: CandidateRecipe) -> None:
    assert limit_pass_tokens(ModelHead.SPARSE, 250_002, Device.GPU) == 536
    buckets = buckets_of(recipe, ModelHead.SPARSE, output_width=250_002)
    assert max(items * tokens for items, tokens in buckets) == 512
    assert max(items for items, _ in buckets) == 8
    masks = buckets_of(recipe, ModelHead.MASKS, output_width=250_002)
    assert max(items * tokens for items, tokens in masks) == 4_096


@pytest.mark.parametrize("recipe", [GPU_FP16_BOUND, OPENVINO_INT8], ids=lambda recipe: recipe.name)
def test_buckets_end_at_the_longest_text_and_are_listed_once(recipe: CandidateRecipe) -> None:
    buckets = buckets_of(recipe, ModelHead.VECTOR, max_tokens=100)
    assert max(tokens for _, tokens in buckets) == 100
    assert len(set(buckets)) == len(buckets)
