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
from deployments.tasks import fill_mask
from deployments.tasks.base import DecodeContext
from deployments.tasks.fill_mask import FillMask, FillMaskOptions
from deployments.tokenization.tokenizer import CachingTokenizer
from deployments.tokenization.vocabulary import TokenVocabulary
from tests.support.artifacts import tiny_manifest
from tests.support.builders import tiny_tokenizer
from tests.support.fakes import far_deadline

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
    """Of a model with a row for every token up to `night`, the last whole word."""
    update = {
        "tasks": (TaskName.FILL_MASK,),
        "mask_token": vocabulary.first_token_id("[MASK]"),
        "output_width": id_of(vocabulary, "night") + 1,
    }
    return tiny_manifest().model_copy(update=update)


def id_of(vocabulary: TokenVocabulary, token: str) -> int:
    found = vocabulary.first_token_id(token)
    assert found is not None
    return found


def encoded(directory: Path, *texts: str) -> list[TokenizedItem]:
    call = Call(texts, ("inputs",) * len(texts), None, Truncation.REFUSE, far_deadline())
    (own,) = CachingTokenizer(directory, max_tokens=64).tokenize([call])
    assert not isinstance(own, ServeError)
    return own.items


class Filler:
    """A model that gives the logits it is told to, and what FillMask makes of them."""

    def __init__(
        self, directory: Path, vocabulary: TokenVocabulary, manifest: ArtifactManifest
    ) -> None:
        self._directory = directory
        self._vocabulary = vocabulary
        self._manifest = manifest

    def row(self, **logits: float) -> NDArray[np.float32]:
        """[W], 0 for every token that is not named."""
        row = np.zeros(self._manifest.output_width, dtype=np.float32)
        for token, logit in logits.items():
            row[id_of(self._vocabulary, token)] = logit
        return row

    def fill(
        self,
        inputs: Any,
        rows: list[list[NDArray[np.float32]]],
        parameters: dict[str, Any] | None = None,
    ) -> Any:
        """The value for `inputs` whose masks get these rows."""
        parsed = TASK.parse(inputs, parameters or {}, self._manifest)
        computed = DecodeContext(
            rows=[np.array(own).reshape(-1, self._manifest.output_width) for own in rows],
            items=encoded(self._directory, *map(str, parsed.texts)),
            token_offsets=(),
            manifest=self._manifest,
            vocabulary=self._vocabulary,
        )
        return TASK.decode(computed, parsed.options)


@pytest.fixture
def filler(directory: Path, vocabulary: TokenVocabulary, manifest: ArtifactManifest) -> Filler:
    return Filler(directory, vocabulary, manifest)


def words(proposals: list[dict[str, Any]]) -> list[str]:
    return [proposal["token_str"] for proposal in proposals]


def test_a_proposal_is_a_score_a_token_and_the_text_with_it(
    filler: Filler, vocabulary: TokenVocabulary, manifest: ArtifactManifest
) -> None:
    row = filler.row(film=6.0, food=4.0)
    best, second, *_ = filler.fill("A [MASK], good!", [[row]])
    total = np.exp(6.0) + np.exp(4.0) + manifest.output_width - 2
    assert best == {
        "score": pytest.approx(np.exp(6.0) / total, abs=1e-6),
        "token": id_of(vocabulary, "film"),
        "token_str": "film",
        "sequence": "a film, good!",
    }
    assert type(best["score"]) is float
    assert type(best["token"]) is int
    assert second["sequence"] == "a food, good!"


def test_five_proposals_come_unless_top_k_says_otherwise(
    filler: Filler, manifest: ArtifactManifest
) -> None:
    row = filler.row(good=3.0, bad=2.0, great=1.0)
    assert words(filler.fill("[MASK]", [[row]])) == ["good", "bad", "great", "[PAD]", "[UNK]"]
    assert words(filler.fill("[MASK]", [[row]], {"top_k": 2})) == ["good", "bad"]
    assert len(filler.fill("[MASK]", [[row]], {"top_k": 10_000})) == manifest.output_width


def test_several_masks_have_a_list_each_and_the_others_stay_in_the_text(filler: Filler) -> None:
    rows = [filler.row(good=5.0), filler.row(film=5.0)]
    first, second = filler.fill("a [MASK] [MASK].", [rows], {"top_k": 1})
    assert first[0]["sequence"] == "[CLS] a good [MASK]. [SEP]"
    assert second[0]["sequence"] == "[CLS] a [MASK] film. [SEP]"


def test_a_list_of_texts_has_an_answer_each_also_when_it_is_a_list_of_one(filler: Filler) -> None:
    good, bad = filler.row(good=5.0), filler.row(bad=5.0)
    one = filler.fill(["a [MASK] film"], [[good]], {"top_k": 1})
    assert [words(answer) for answer in one] == [["good"]]
    single, several = filler.fill(
        ["a [MASK] film", "[MASK] or [MASK]"], [[good], [bad, good]], {"top_k": 1}
    )
    assert words(single) == ["good"]
    assert [words(answer) for answer in several] == [["bad"], ["good"]]


def test_targets_are_the_only_proposals_with_their_share_of_all_tokens(
    filler: Filler, manifest: ArtifactManifest
) -> None:
    row = filler.row(film=6.0, food=4.0, city=2.0)
    answer = filler.fill("the [MASK]", [[row]], {"targets": ["city", "food", "city"]})
    assert words(answer) == ["food", "city"]
    total = np.exp(6.0) + np.exp(4.0) + np.exp(2.0) + manifest.output_width - 3
    assert answer[1]["score"] == pytest.approx(np.exp(2.0) / total, abs=1e-6)
    alone = filler.fill("the [MASK]", [[row]], {"targets": "city", "top_k": 3})
    assert alone == [answer[1]]


def test_a_target_of_several_tokens_counts_as_its_first_one(filler: Filler) -> None:
    # `city` with letters that no model row is for, and a word in capitals.
    answer = filler.fill("the [MASK]", [[filler.row()]], {"targets": ["city life", "FOOD"]})
    assert sorted(words(answer)) == ["city", "food"]


@pytest.mark.parametrize("target", [" ", "\u200b", "zebra"])
def test_targets_that_the_model_has_no_row_for_are_left_out(filler: Filler, target: str) -> None:
    # The letters of `zebra` stand behind the model's last row.
    row = filler.row(film=1.0)
    assert words(filler.fill("[MASK]", [[row]], {"targets": [target, "film"]})) == ["film"]
    with pytest.raises(InvalidField, match="no target is a token") as refusal:
        filler.fill("[MASK]", [[row]], {"targets": target})
    assert refusal.value.field == "parameters.targets"


@pytest.mark.parametrize(
    ("inputs", "rows", "field"),
    [("a film", [0], "inputs"), (["a [MASK]", "a film"], [1, 0], "inputs[1]")],
)
def test_a_text_without_a_mask_is_refused_by_name(
    filler: Filler, inputs: Any, rows: list[int], field: str
) -> None:
    with pytest.raises(InvalidField) as refusal:
        filler.fill(inputs, [[filler.row()] * masks for masks in rows])
    assert refusal.value.message == "No mask_token ([MASK]) found on the input"
    assert refusal.value.field == field


def test_more_text_than_an_encoder_can_tell_in_time_is_refused(
    filler: Filler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # [CLS] [MASK] [MASK] [SEP]: two masks times four tokens, per proposal.
    monkeypatch.setattr(fill_mask, "MAX_TOKENS_PER_RESPONSE", 16)
    rows = [filler.row(), filler.row()]
    assert len(filler.fill("[MASK] [MASK]", [rows], {"top_k": 2})) == 2
    with pytest.raises(InvalidField, match="repeat 24 tokens") as refusal:
        filler.fill("[MASK] [MASK]", [rows], {"top_k": 3})
    assert refusal.value.field == "parameters.top_k"


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
def test_what_cannot_be_filled_is_refused_by_name(
    manifest: ArtifactManifest,
    inputs: Any,
    parameters: dict[str, Any],
    error: type[ServeError],
    field: str,
) -> None:
    with pytest.raises(error) as refusal:
        TASK.parse(inputs, parameters, manifest)
    assert refusal.value.field == field


def test_null_is_not_given(manifest: ArtifactManifest) -> None:
    parsed = TASK.parse("[MASK]", {"top_k": None, "targets": None}, manifest)
    assert parsed.options == FillMaskOptions(5, (), ("inputs",), single=True)
    assert parsed.truncation is Truncation.REFUSE


def test_it_is_for_models_that_answer_for_masks(manifest: ArtifactManifest) -> None:
    assert TASK.fits(manifest)
    assert not TASK.fits(tiny_manifest())
    assert not TASK.fits(tiny_manifest(labels=("A", "B")))


@pytest.mark.parametrize(
    ("parameters", "claimed"),
    [({"targets": ["a"]}, True), ({"targets": None}, False), ({"top_k": 3}, False)],
)
def test_targets_are_meant_for_it(parameters: dict[str, Any], claimed: bool) -> None:
    assert TASK.matches("a", parameters) is claimed
