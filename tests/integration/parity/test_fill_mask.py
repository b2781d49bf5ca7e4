"""fill-mask equals the pipeline of transformers on the same weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from transformers.pipelines import PipelineException

from benchmarks.common.local_model import LocalModel
from tests.support.parity_models import (
    PARITY_MODEL,
    ParityModel,
    RefusedError,
    ServedModel,
    agreement,
    decided,
)
from tests.support.parity_texts import varied_texts, with_masks

INPUTS = 240
# For scores. The two sides add float32 numbers in different orders.
TOLERANCE = 2e-6
TARGETS = ["film", "Food", "zebra", "東京", "##s", "film", "[SEP]"]


@pytest.fixture(scope="module")
def pipeline(mask_filler: ParityModel) -> Any:
    return mask_filler.pipeline()


@pytest.fixture(scope="module")
def texts(mask_filler: ParityModel) -> list[str]:
    """Texts with one mask each. The longest text has the model's maximum length."""
    plain = varied_texts(mask_filler.checkpoint, INPUTS, max_tokens=61)
    return [with_masks(text, 1, seed=i) for i, text in enumerate(plain)]


@pytest.fixture(scope="module")
def expected(pipeline: Any, texts: list[str]) -> list[Any]:
    answers: list[Any] = pipeline(texts)
    return answers


@pytest.fixture
async def app(mask_filler: ParityModel) -> AsyncIterator[ServedModel]:
    async with mask_filler.serving() as served:
        yield served


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert the same predictions in the same order, also in nested lists."""
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        if isinstance(their, list):
            assert_same(our, their)
        else:
            assert our == {**their, "score": pytest.approx(their["score"], abs=TOLERANCE)}


async def test_single_texts_equal_the_pipeline(
    app: ServedModel, texts: list[str], expected: list[Any]
) -> None:
    assert len(texts) >= 200
    assert_same(await app.alone(texts), expected)


async def test_batched_texts_equal_the_pipeline(
    app: ServedModel, texts: list[str], expected: list[Any]
) -> None:
    assert_same(await app.mixed(texts), expected)


@pytest.mark.parametrize("top_k", [1, 3, 50, 10_000])
async def test_top_k_equals_the_pipeline(
    app: ServedModel, pipeline: Any, texts: list[str], top_k: int
) -> None:
    few = texts[:20]
    limit = min(top_k, app.manifest.output_width)
    assert_same(await app.mixed(few, {"top_k": top_k}), pipeline(few, top_k=limit))


@pytest.mark.parametrize("targets", [TARGETS, ["film"], "lovely", "unfamiliar"])
@pytest.mark.parametrize("top_k", [None, 2])
async def test_targets_equal_the_pipeline(
    app: ServedModel, pipeline: Any, texts: list[str], targets: Any, top_k: int | None
) -> None:
    parameters = {"targets": targets, "top_k": top_k}
    few = texts[:60]
    assert_same(await app.mixed(few, parameters), pipeline(few, **parameters))


async def test_several_masks_equal_the_pipeline(
    app: ServedModel, pipeline: Any, mask_filler: ParityModel
) -> None:
    plain = varied_texts(mask_filler.checkpoint, INPUTS, max_tokens=54, seed=1)
    texts = [with_masks(text, i % 8 + 1, seed=i) for i, text in enumerate(plain)]
    expected = pipeline(texts)
    assert "[MASK]" in expected[7][0][0]["sequence"]
    assert_same(await app.alone(texts), expected)
    assert_same(await app.mixed(texts), expected)


@pytest.mark.parametrize("inputs", ["a film", ["a [MASK] film", "a film"]])
async def test_text_without_mask_has_the_error_of_the_pipeline(
    app: ServedModel, pipeline: Any, inputs: Any
) -> None:
    with pytest.raises(PipelineException, match="No mask_token") as theirs:
        pipeline(inputs)
    with pytest.raises(RefusedError) as ours:
        await app.ask(inputs)
    assert ours.value.status == 400
    assert ours.value.body["error"] == [str(theirs.value)]
    assert ours.value.body["field"] == ("inputs" if isinstance(inputs, str) else "inputs[1]")


async def test_local_model_equals_the_server(
    app: ServedModel, mask_filler: ParityModel, texts: list[str]
) -> None:
    local = LocalModel.open(mask_filler.store(), PARITY_MODEL)
    assert local.unbatched_values(texts[:20], threads=1) == await app.alone(texts[:20])


async def test_int8_first_proposals_agree_with_fp32(mask_filler: ParityModel) -> None:
    """fp32 is the reference, because the tests above compare it with the pipeline.

    With random weights, many best scores lead by less than int8's rounding error. So the limit is
    90 % for all texts, and 98 % for texts whose best score has a clear lead.
    """
    plain = varied_texts(mask_filler.checkpoint, 900, max_tokens=61, seed=2)
    texts = [with_masks(text, 1, seed=i) for i, text in enumerate(plain)]
    async with mask_filler.serving() as app:
        exact = await app.mixed(texts)
    async with mask_filler.serving("int8") as app:
        alone, mixed = await app.alone(texts), await app.mixed(texts)
    decided_indices = decided(exact)
    assert len(decided_indices) >= 200
    for answers in (alone, mixed):
        ours, theirs = ([best[0]["token"] for best in each] for each in (answers, exact))
        assert agreement(ours, theirs) >= 0.9
        assert (
            agreement([ours[i] for i in decided_indices], [theirs[i] for i in decided_indices])
            >= 0.98
        )
