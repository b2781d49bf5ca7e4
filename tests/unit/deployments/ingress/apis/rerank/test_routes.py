"""Tests of /rerank in the format of each API, and of /classify in the Infinity server's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.pair_template import PairTemplate
from deployments.artifacts.types import TaskName
from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import Overloaded
from tests.support.artifacts import CLASSIFIER, EMBEDDER, seal, seal_tiny
from tests.support.fakes import FailingEncoder
from tests.support.in_process import InProcess

RANKER = "tiny/ranker"
MODELS = (
    EMBEDDER,
    CLASSIFIER,
    RANKER,
)  # The cross-encoder is last, so a test can detect that it is preferred.
QUERY = "good film"
TEXTS = ["night", "lovely food", "the river"]
DOCUMENTS = {"query": QUERY, "documents": TEXTS}
PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", f"/models/{RANKER}/rerank")
LIMITS = IngressUserConfig(limits=LimitSettings(items=3, body_bytes=2_000, item_chars=500))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a store with an embedder, a classifier and a cross-encoder."""
    made = tmp_path_factory.mktemp("rankers")
    seal_tiny(made, EMBEDDER)
    seal_tiny(made, CLASSIFIER, labels=("NEGATIVE", "NEUTRAL", "POSITIVE"))
    seal_tiny(made, RANKER, labels=("SCORE",), tasks=(TaskName.TEXT_RANKING,))
    return made


def ranking(store: Path, **options: Any) -> InProcess:
    return InProcess(store, **{"models": MODELS, **options})


@pytest.mark.parametrize("path", PATHS)
async def test_texts_return_a_sorted_list(path: str, store: Path) -> None:
    async with ranking(store).client() as http:
        response = await http.post(path, json={"query": QUERY, "texts": TEXTS})
    ranked = response.json()
    assert [set(one) for one in ranked] == [{"index", "score"}] * 3
    assert sorted(one["index"] for one in ranked) == [0, 1, 2]
    scores = [one["score"] for one in ranked]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert response.headers["x-total-time"].isdecimal()


async def test_return_text_and_raw_scores_change_the_result(store: Path) -> None:
    body = {"query": QUERY, "texts": TEXTS, "return_text": True}
    async with ranking(store).client() as http:
        plain = (await http.post("/rerank", json=body)).json()
        raw = (await http.post("/rerank", json=body | {"raw_scores": True})).json()
    assert all(one["text"] == TEXTS[one["index"]] for one in plain)
    logits = np.array([one["score"] for one in raw])
    scores = [one["score"] for one in plain]
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), scores, atol=1e-6)


async def test_default_ranker_prefers_a_cross_encoder(store: Path) -> None:
    body = {"query": QUERY, "texts": TEXTS}
    async with ranking(store).client() as http:
        best = (await http.post("/rerank", json=body)).json()
        named = (await http.post("/rerank", json=body | {"model": RANKER})).json()
        filler = (await http.post("/rerank", json=body | {"model": "default"})).json()
        cosines = (await http.post("/rerank", json=body | {"model": EMBEDDER})).json()
        on_hugging_face = (await http.post("/", json={"inputs": body})).json()
    async with ranking(store, models=(EMBEDDER,)).client() as http:
        alone = (await http.post("/rerank", json=body)).json()
    assert best == named == filler == on_hugging_face
    assert alone == cosines != best


@pytest.mark.parametrize("body", [{"texts": TEXTS}, {"documents": TEXTS}], ids=["TEI", "Cohere"])
async def test_instruction_reaches_the_model_that_reads_one(
    body: dict[str, Any], tmp_path: Path
) -> None:
    """Two models with equal weights: one has the instruction that the other gets in the request."""
    for name, instruction in (("tiny/lovely", "lovely"), ("tiny/bad", "bad")):
        directory = seal_tiny(tmp_path, name, labels=("SCORE",), tasks=(TaskName.TEXT_RANKING,))
        template = PairTemplate(
            instruction=instruction, before_first=" ", before_second=" ", end=""
        )
        manifest = ArtifactManifest.read(directory)
        seal(directory, manifest.model_copy(update={"pair_template": template}))
    async with InProcess(tmp_path, models=("tiny/lovely", "tiny/bad")).client() as http:

        async def rank(model: str, **instruction: str) -> Any:
            sent = {**body, "query": QUERY, "model": model, **instruction}
            answer = (await http.post("/rerank", json=sent)).json()
            return answer["results"] if "documents" in body else answer

        assert await rank("tiny/bad", instruction="lovely") == await rank("tiny/lovely")
        assert await rank("tiny/bad") != await rank("tiny/lovely")


async def test_instruction_counts_once_per_text_and_is_no_part_of_a_cut(tmp_path: Path) -> None:
    """The server reads the instruction with each text, so that a small body can be much work."""
    directory = seal_tiny(tmp_path, RANKER, labels=("SCORE",), tasks=(TaskName.TEXT_RANKING,))
    template = PairTemplate(
        instruction="bad", before_first=" ", before_second=" ", end=" river", end_tokens=2
    )
    manifest = ArtifactManifest.read(directory)
    seal(directory, manifest.model_copy(update={"pair_template": template}))
    limits = IngressUserConfig(limits=LimitSettings(item_chars=500, request_chars=1_000))
    async with InProcess(tmp_path, models=(RANKER,), settings=limits).client() as http:

        async def rank(instruction: str, *texts: str) -> Any:
            body = {"query": QUERY, "texts": texts, "instruction": instruction}
            return (await http.post("/rerank", json=body)).json()

        refused = await rank("lovely " * 60, "night", "food", "river")
        assert "`texts` makes 1301 characters in total; the maximum is 1000" in refused["error"]
        assert len(await rank("lovely " * 60, "night", "food")) == 2
        cut, whole = await rank("lovely", "good " * 200), await rank("lovely", "good " * 80)
        assert cut[0]["score"] == whole[0]["score"], "the end of the text is kept"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [{"texts": TEXTS}, {"documents": TEXTS}], ids=["TEI", "Cohere"])
async def test_instruction_is_refused_by_a_model_that_reads_none(
    path: str, body: dict[str, Any], store: Path
) -> None:
    async with ranking(store).client() as http:
        response = await http.post(path, json={**body, "query": QUERY, "instruction": "prove"})
    assert response.status_code in (400, 422)
    assert "`instruction` is set, and the model reads no instruction" in response.text


@pytest.mark.parametrize("path", PATHS)
async def test_documents_return_an_envelope(path: str, store: Path) -> None:
    async with ranking(store).client() as http:
        response = await http.post(path, json=DOCUMENTS)
        as_texts = await http.post(path, json={"query": QUERY, "texts": TEXTS})
    result = response.json()
    assert result["results"] == [
        {"index": one["index"], "relevance_score": one["score"]} for one in as_texts.json()
    ]
    assert (result["object"], result["model"]) == ("rerank", RANKER)
    assert isinstance(result["id"], str)
    assert result["created"] > 1_700_000_000
    assert result["usage"]["total_tokens"] == result["meta"]["tokens"]["input_tokens"] > 0
    assert result["meta"]["api_version"]["version"] == ("2" if path == "/v2/rerank" else "1")


@pytest.mark.parametrize("model", [RANKER, EMBEDDER])
async def test_an_empty_document_does_not_change_the_scores_of_others(
    model: str, store: Path
) -> None:
    body = {"query": QUERY, "model": model, "return_documents": True}
    async with ranking(store).client() as http:
        plain = await http.post("/v1/rerank", json=body | {"documents": TEXTS})
        documents = [*TEXTS, "", {"text": ""}]
        response = await http.post("/v1/rerank", json=body | {"documents": documents})
    scores = {one["index"]: one["relevance_score"] for one in response.json()["results"]}
    assert scores[len(TEXTS)] == scores[len(TEXTS) + 1]
    for one in plain.json()["results"]:
        assert scores[one["index"]] == pytest.approx(one["relevance_score"], abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_slash_at_the_end_of_the_path_does_not_change_the_format(
    path: str, store: Path
) -> None:
    body = {**DOCUMENTS, "return_documents": True}
    async with ranking(store).client() as http:
        plain, slashed = [(await http.post(each, json=body)).json() for each in (path, path + "/")]
    assert slashed["results"] == plain["results"]
    assert slashed["meta"] == plain["meta"]


async def test_top_n_limits_results(store: Path) -> None:
    async with ranking(store).client() as http:
        every = (await http.post("/v2/rerank", json=DOCUMENTS)).json()["results"]
        best = (await http.post("/v2/rerank", json=DOCUMENTS | {"top_n": 2})).json()["results"]
        more = (await http.post("/v2/rerank", json=DOCUMENTS | {"top_n": 9})).json()["results"]
    assert best == every[:2]
    assert more == every


@pytest.mark.parametrize(("fields", "status"), [(["text"], 200), (["title", "text"], 400)])
async def test_only_the_texts_of_documents_are_ranked(
    fields: list[str], status: int, store: Path
) -> None:
    async with InProcess(store).client() as http:
        response = await http.post("/v1/rerank", json=DOCUMENTS | {"rank_fields": fields})
    assert response.status_code == status
    assert status == 200 or "rank_fields" in response.json()["message"]


async def test_return_documents_has_the_format_of_each_api(store: Path) -> None:
    body = DOCUMENTS | {"return_documents": True}
    async with ranking(store).client() as http:
        cohere, infinity = [
            (await http.post(path, json=body)).json()["results"]
            for path in ("/v1/rerank", "/rerank")
        ]
    assert all(one["document"] == {"text": TEXTS[one["index"]]} for one in cohere)
    assert all(one["document"] == TEXTS[one["index"]] for one in infinity)


async def test_documents_may_be_objects_with_keys_of_other_apis(store: Path) -> None:
    objects = [{"text": text, "title": "any"} for text in TEXTS]
    extras = {"max_tokens_per_doc": 4096, "rank_fields": ["text"], "user": "u1", "top_n": None}
    async with ranking(store).client() as http:
        plain = (await http.post("/v1/rerank", json=DOCUMENTS)).json()["results"]
        same = await http.post("/v1/rerank", json={"query": QUERY, "documents": objects, **extras})
    assert same.json()["results"] == plain


async def test_long_documents_are_truncated_with_a_warning_header(store: Path) -> None:
    body = {"query": QUERY, "documents": ["good " * 30]}
    async with ranking(store).client() as http:
        response = await http.post("/v2/rerank", json=body)
        rejected = await http.post(
            "/rerank", json={"query": QUERY, "texts": ["good " * 30], "truncate": False}
        )
    assert response.headers["x-hf-warning"].startswith("input-truncated")
    assert (rejected.status_code, rejected.json()["error_type"]) == (422, "Validation")
    assert "`texts[0]`" in rejected.json()["error"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", f"/models/{RANKER}/v2/rerank"])
@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"query": QUERY}, 400, "invalid_field", "documents"),
        ({"documents": TEXTS}, 400, "invalid_field", "query"),
        ({"query": "", "documents": TEXTS}, 400, "empty_input", "query"),
        ({"query": QUERY, "documents": []}, 400, "empty_input", "documents"),
        ({"query": QUERY, "documents": ["a", 7]}, 400, "invalid_field", "documents[1]"),
        ({"query": QUERY, "documents": [{}]}, 400, "invalid_field", "documents[0].text"),
        ({"query": QUERY, "documents": "a"}, 400, "invalid_field", "documents"),
        (DOCUMENTS | {"top_n": 0}, 400, "invalid_field", "top_n"),
        (DOCUMENTS | {"documents": ["a"] * 4}, 422, "too_many_items", "documents"),
    ],
)
async def test_errors_name_the_key_of_the_body(
    path: str, body: dict[str, Any], status: int, code: str, param: str, store: Path
) -> None:
    async with ranking(store, settings=LIMITS).client() as http:
        response = await http.post(path, json=body)
    result = response.json()
    assert (response.status_code, result["error"]["code"], result["error"]["param"]) == (
        status, code, param,
    )  # fmt: skip
    assert result["message"] == result["error"]["message"]
    assert "`inputs" not in result["message"]


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [("no/such", 404, "model_not_found"), (CLASSIFIER, 400, "wrong_task")],
)
async def test_models_without_ranking_are_rejected_in_each_error_format(
    model: str, status: int, code: str, store: Path
) -> None:
    async with ranking(store).client() as http:
        cohere = await http.post("/v1/rerank", json=DOCUMENTS | {"model": model})
        infinity = await http.post("/rerank", json=DOCUMENTS | {"model": model})
        tei = await http.post("/rerank", json={"query": "a", "texts": ["b"], "model": model})
    assert (cohere.status_code, cohere.json()["error"]["code"]) == (status, code)
    assert infinity.json() == cohere.json()
    assert tei.status_code == (424 if code == "wrong_task" else status)
    assert isinstance(tei.json()["error"], str)


async def test_null_texts_count_as_missing(store: Path) -> None:
    async with ranking(store).client() as http:
        response = await http.post("/rerank", json=DOCUMENTS | {"texts": None})
        neither = await http.post("/rerank", json={"query": QUERY, "texts": None})
    assert (response.status_code, len(response.json()["results"])) == (200, 3)
    assert (neither.status_code, neither.json()["error"]) == (
        422,
        "Error in `texts`: field required",
    )


async def test_overload_sets_retry_after(store: Path) -> None:
    async with ranking(store, encoder=FailingEncoder(Overloaded("full"))).client() as http:
        response = await http.post("/v2/rerank", json=DOCUMENTS)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("path", ["/classify", f"/models/{CLASSIFIER}/classify"])
async def test_classify_returns_the_format_of_infinity(path: str, store: Path) -> None:
    body = {"input": ["good film", "night"], "model": CLASSIFIER}
    async with ranking(store).client() as http:
        result = (await http.post(path, json=body)).json()
        raw = (await http.post(path, json=body | {"raw_scores": True})).json()
        plain = await http.post(f"/models/{CLASSIFIER}", json={"inputs": body["input"]})
    assert (result["object"], result["model"]) == ("classify", CLASSIFIER)
    assert result["data"] == plain.json()
    assert result["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert {"id", "created"} <= set(result)
    powers = np.exp([one["score"] for one in raw["data"][0]])
    scores = [one["score"] for one in result["data"][0]]
    np.testing.assert_allclose(powers / powers.sum(), scores, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "invalid_field", "input"),
        ({"input": []}, 400, "empty_input", "input"),
        ({"input": ["a", 7]}, 400, "invalid_field", "input[1]"),
        ({"input": ["a"] * 4}, 422, "too_many_items", "input"),
        ({"input": "a", "model": EMBEDDER}, 400, "wrong_task", "model"),
    ],
)
async def test_classification_errors(
    body: dict[str, Any], status: int, code: str, param: str, store: Path
) -> None:
    async with ranking(store, settings=LIMITS).client() as http:
        response = await http.post("/classify", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
