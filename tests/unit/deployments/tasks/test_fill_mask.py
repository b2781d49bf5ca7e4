from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import TaskName
from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.messages import Call, TokenizedItem, Truncation
from deployments.replicas.encoder_calls import INLINE_DECODE_S
from deployments.tasks import fill_mask
from deployments.tasks.base import DecodeContext
from deployments.tasks.fill_mask import FillMask, FillMaskOptions
from deployments.tokenization.tokenizer import CachingTokenizer
from deployments.tokenization.vocabulary import TokenVocabulary
from tests.support.artifacts import tiny_manifest, with_tasks
from tests.support.fakes import far_deadline
from tests.support.tiny_encoders import tiny_tokenizer

TASK = FillMask()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def vocabulary(directory: Path) -> TokenVocabulary:
    return TokenVocabulary(directory)


@pytest.fixture(scope="module")
def manifest(vocabulary: TokenVocabulary) -> ArtifactManifest:
    """Return the manifest of a model whose logits end at the id of `night`.

    Single letters have higher ids, so the model has no output for them.
    """
    update = {
        "mask_token": vocabulary.first_token_id("[MASK]"),
        "output_width": find_id(vocabulary, "night") + 1,
    }
    return with_tasks(tiny_manifest(), TaskName.FILL_MASK).model_copy(update=update)


def find_id(vocabulary: TokenVocabulary, token: str) -> int:
    found = vocabulary.first_token_id(token)
    assert found is not None
    return found


def tokenize(directory: Path, *texts: str) -> list[TokenizedItem]:
    call = Call(texts, ("inputs",) * len(texts), None, Truncation.REFUSE, far_deadline())
    (item,) = CachingTokenizer(directory, max_tokens=64).tokenize([call])
    assert not isinstance(item, ServeError)
    return item.items


class FillMaskDecoder:
    """Decoder of given logits with FillMask."""

    def __init__(
        self, directory: Path, vocabulary: TokenVocabulary, manifest: ArtifactManifest
    ) -> None:
        self._directory = directory
        self._vocabulary = vocabulary
        self._manifest = manifest

    def row(self, **logits: float) -> NDArray[np.float32]:
        """Return logits [W] with the given values by token, 0 for every other token."""
        row = np.zeros(self._manifest.output_width, dtype=np.float32)
        for token, logit in logits.items():
            row[find_id(self._vocabulary, token)] = logit
        return row

    def fill(
        self,
        inputs: Any,
        rows: list[list[NDArray[np.float32]]],
        parameters: dict[str, Any] | None = None,
    ) -> Any:
        """Return the response to `inputs`. `rows` has the logits of every mask of every text."""
        parsed = TASK.parse(inputs, parameters or {}, self._manifest)
        computed = DecodeContext(
            rows=[np.array(item).reshape(-1, self._manifest.output_width) for item in rows],
            items=tokenize(self._directory, *map(str, parsed.texts)),
            token_offsets=(),
            manifest=self._manifest,
            vocabulary=self._vocabulary,
        )
        return TASK.decode(computed, parsed.options)


@pytest.fixture
def mask_decoder(
    directory: Path, vocabulary: TokenVocabulary, manifest: ArtifactManifest
) -> FillMaskDecoder:
    return FillMaskDecoder(directory, vocabulary, manifest)


def token_texts(proposals: list[dict[str, Any]]) -> list[str]:
    return [proposal["token_str"] for proposal in proposals]


def test_many_predictions_of_one_mask_are_predicted_to_take_long(
    directory: Path, manifest: ArtifactManifest
) -> None:
    def predict_s(top_k: int, **parameters: Any) -> float:
        text = "[MASK] " + "food " * 30
        parsed = TASK.parse(text, {"top_k": top_k, **parameters}, manifest)
        wide = manifest.model_copy(update={"output_width": 30_000})
        rows, items = [np.zeros((1, 30_000), np.float32)], tokenize(directory, text)
        context = DecodeContext(rows=rows, items=items, token_offsets=(), manifest=wide)
        return TASK.predict_decode_s(context, parsed.options)

    assert predict_s(5) < INLINE_DECODE_S < 0.3 < predict_s(30_000)
    assert predict_s(30_000, targets=["food"]) < INLINE_DECODE_S
    # Each target is tokenized.
    assert predict_s(5, targets=[f"{n} " + "food " * 30 for n in range(500)]) > INLINE_DECODE_S


def test_proposal_has_score_token_and_filled_text(
    mask_decoder: FillMaskDecoder, vocabulary: TokenVocabulary, manifest: ArtifactManifest
) -> None:
    row = mask_decoder.row(film=6.0, food=4.0)
    best, second, *_ = mask_decoder.fill("A [MASK], good!", [[row]])
    total = np.exp(6.0) + np.exp(4.0) + manifest.output_width - 2
    assert best == {
        "score": pytest.approx(np.exp(6.0) / total, abs=1e-6),
        "token": find_id(vocabulary, "film"),
        "token_str": "film",
        "sequence": "a film, good!",
    }
    assert type(best["score"]) is float
    assert type(best["token"]) is int
    assert second["sequence"] == "a food, good!"


def test_top_k_is_five_by_default(
    mask_decoder: FillMaskDecoder, manifest: ArtifactManifest
) -> None:
    row = mask_decoder.row(good=3.0, bad=2.0, great=1.0)
    assert token_texts(mask_decoder.fill("[MASK]", [[row]])) == [
        "good",
        "bad",
        "great",
        "[PAD]",
        "[UNK]",
    ]
    assert token_texts(mask_decoder.fill("[MASK]", [[row]], {"top_k": 2})) == ["good", "bad"]
    assert len(mask_decoder.fill("[MASK]", [[row]], {"top_k": 10_000})) == manifest.output_width


def test_several_masks_return_a_list_per_mask(mask_decoder: FillMaskDecoder) -> None:
    rows = [mask_decoder.row(good=5.0), mask_decoder.row(film=5.0)]
    first, second = mask_decoder.fill("a [MASK] [MASK].", [rows], {"top_k": 1})
    assert first[0]["sequence"] == "[CLS] a good [MASK]. [SEP]"
    assert second[0]["sequence"] == "[CLS] a [MASK] film. [SEP]"


def test_list_of_texts_returns_a_list(mask_decoder: FillMaskDecoder) -> None:
    good, bad = mask_decoder.row(good=5.0), mask_decoder.row(bad=5.0)
    one = mask_decoder.fill(["a [MASK] film"], [[good]], {"top_k": 1})
    assert [token_texts(answer) for answer in one] == [["good"]]
    single, several = mask_decoder.fill(
        ["a [MASK] film", "[MASK] or [MASK]"], [[good], [bad, good]], {"top_k": 1}
    )
    assert token_texts(single) == ["good"]
    assert [token_texts(answer) for answer in several] == [["bad"], ["good"]]


def test_targets_limit_proposals_and_keep_their_scores(
    mask_decoder: FillMaskDecoder, manifest: ArtifactManifest
) -> None:
    row = mask_decoder.row(film=6.0, food=4.0, city=2.0)
    answer = mask_decoder.fill("the [MASK]", [[row]], {"targets": ["city", "food", "city"]})
    assert token_texts(answer) == ["food", "city"]
    total = np.exp(6.0) + np.exp(4.0) + np.exp(2.0) + manifest.output_width - 3
    assert answer[1]["score"] == pytest.approx(np.exp(2.0) / total, abs=1e-6)
    alone = mask_decoder.fill("the [MASK]", [[row]], {"targets": "city", "top_k": 3})
    assert alone == [answer[1]]


def test_target_of_several_tokens_uses_its_first_token(mask_decoder: FillMaskDecoder) -> None:
    # Neither target is in the vocabulary. Their first tokens are `city` and `food`.
    answer = mask_decoder.fill(
        "the [MASK]", [[mask_decoder.row()]], {"targets": ["city life", "FOOD"]}
    )
    assert sorted(token_texts(answer)) == ["city", "food"]


@pytest.mark.parametrize("target", [" ", "\u200b", "zebra"])
def test_target_without_model_output_is_left_out(
    mask_decoder: FillMaskDecoder, target: str
) -> None:
    # ` ` and `\u200b` have no tokens. The tokens of `zebra` are letters, without a model output.
    row = mask_decoder.row(film=1.0)
    assert token_texts(mask_decoder.fill("[MASK]", [[row]], {"targets": [target, "film"]})) == [
        "film"
    ]
    with pytest.raises(InvalidField, match="no target is a token") as caught:
        mask_decoder.fill("[MASK]", [[row]], {"targets": target})
    assert caught.value.field == "parameters.targets"


@pytest.mark.parametrize(
    ("inputs", "rows", "field"),
    [("a film", [0], "inputs"), (["a [MASK]", "a film"], [1, 0], "inputs[1]")],
)
def test_text_without_mask_is_rejected_with_its_path(
    mask_decoder: FillMaskDecoder, inputs: Any, rows: list[int], field: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        mask_decoder.fill(inputs, [[mask_decoder.row()] * masks for masks in rows])
    assert caught.value.message == "No mask_token ([MASK]) found on the input"
    assert caught.value.field == field


def test_too_many_response_tokens_are_rejected(
    mask_decoder: FillMaskDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each prediction has the four tokens [CLS] [MASK] [MASK] [SEP] for each of the two masks.
    monkeypatch.setattr(fill_mask, "MAX_TOKENS_PER_RESPONSE", 16)
    rows = [mask_decoder.row(), mask_decoder.row()]
    assert len(mask_decoder.fill("[MASK] [MASK]", [rows], {"top_k": 2})) == 2
    with pytest.raises(InvalidField, match="repeat 24 tokens") as caught:
        mask_decoder.fill("[MASK] [MASK]", [rows], {"top_k": 3})
    assert caught.value.field == "parameters.top_k"


@pytest.mark.parametrize(
    ("inputs", "parameters", "error", "field"),
    [
        ("", {}, EmptyInput, "inputs"),
        ([], {}, EmptyInput, "inputs"),
        (["[MASK]", 3], {}, InvalidField, "inputs[1]"),
        ({"text": "[MASK]"}, {}, InvalidField, "inputs"),
        ("[MASK]", {"top_k": 0}, InvalidField, "parameters.top_k"),
        ("[MASK]", {"top_k": "5"}, InvalidField, "parameters.top_k"),
        ("[MASK]", {"targets": []}, EmptyInput, "parameters.targets"),
        ("[MASK]", {"targets": ["a", ""]}, EmptyInput, "parameters.targets[1]"),
        ("[MASK]", {"targets": [3]}, InvalidField, "parameters.targets[0]"),
        ("[MASK]", {"targets": {"a": 1}}, InvalidField, "parameters.targets"),
        ("[MASK]", {"targets": ["a"] * 1001}, InvalidField, "parameters.targets"),
        ("[MASK]", {"targets": "a" * 201}, InvalidField, "parameters.targets[0]"),
        ("[MASK]", {"function_to_apply": "none"}, UnknownParameter, "parameters.function_to_apply"),
    ],
)
def test_invalid_request_is_rejected_with_its_path(
    manifest: ArtifactManifest,
    inputs: Any,
    parameters: dict[str, Any],
    error: type[ServeError],
    field: str,
) -> None:
    with pytest.raises(error) as caught:
        TASK.parse(inputs, parameters, manifest)
    assert caught.value.field == field


def test_null_parameters_are_the_defaults(manifest: ArtifactManifest) -> None:
    parsed = TASK.parse("[MASK]", {"top_k": None, "targets": None}, manifest)
    assert parsed.options == FillMaskOptions(5, (), ("inputs",), single=True)
    assert parsed.truncation is Truncation.REFUSE


def test_task_fits_only_masked_language_models(manifest: ArtifactManifest) -> None:
    assert TASK.fits(manifest)
    assert not TASK.fits(tiny_manifest())
    assert not TASK.fits(tiny_manifest(labels=("A", "B")))


@pytest.mark.parametrize(
    ("parameters", "matches"),
    [({"targets": ["a"]}, True), ({"targets": None}, False), ({"top_k": 3}, False)],
)
def test_task_matches_targets(parameters: dict[str, Any], matches: bool) -> None:
    assert TASK.matches("a", parameters) is matches
