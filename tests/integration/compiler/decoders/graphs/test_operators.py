from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from build_artifacts.decoders.graphs.operators import (
    distance_buckets,
    sinusoids,
    stretched_sinusoids,
)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 12), (64, 256), (32, 100)])
def test_distance_buckets_match_t5(both_ways: bool, buckets: int, farthest: int) -> None:
    distances = np.arange(-600, 601)
    actual = distance_buckets(distances, both_ways=both_ways, buckets=buckets, farthest=farthest)
    expected = T5Attention._relative_position_bucket(
        torch.from_numpy(distances), both_ways, buckets, farthest
    )
    np.testing.assert_array_equal(actual, expected.numpy())


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 12), (32, 100)])
def test_distance_buckets_are_constant_beyond_maximum(buckets: int, farthest: int) -> None:
    beyond = np.arange(farthest, 5 * farthest)
    for distances in (beyond, -beyond):
        actual = distance_buckets(distances, both_ways=True, buckets=buckets, farthest=farthest)
        assert len(set(actual.tolist())) == 1


@pytest.mark.parametrize("width", [64, 33])
def test_sinusoids_match_marian(width: int) -> None:
    expected = MarianSinusoidalPositionalEmbedding(200, width).create_weight()
    np.testing.assert_allclose(sinusoids(200, width), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("width", [64, 33])
def test_stretched_sinusoids_match_m2m_100(width: int) -> None:
    expected = M2M100SinusoidalPositionalEmbedding.get_embedding(1024, width)
    np.testing.assert_allclose(stretched_sinusoids(1024, width), expected.numpy(), atol=2e-4)
