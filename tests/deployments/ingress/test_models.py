from __future__ import annotations

from pathlib import Path

import pytest

from deployments.ingress.models import owner
from deployments.manifest import TaskName
from tests.deployments.in_process import InProcess
from tests.sealed import CLASSIFIER, EMBEDDER, GRAPH_NAME, MAX_TOKENS, WIDTH, seal_tiny


async def test_a_model_says_what_it_does_and_where_it_runs(tiny_store: Path) -> None:
    async with InProcess(tiny_store, gpus=0).client() as http:
        facts = (await http.get(f"/models/{EMBEDDER}")).json()
    assert facts["id"] == EMBEDDER
    assert facts["object"] == "model"
    assert facts["owned_by"] == "tiny"
    assert facts["created"] > 1_700_000_000
    assert facts["state"] == "ready"
    assert facts["tasks"] == facts["served_tasks"] == ["feature-extraction", "sentence-similarity"]
    assert (facts["max_tokens"], facts["width"]) == (MAX_TOKENS, WIDTH)
    assert facts["lanes"] == {
        "cpu": {"compute_type": "cpu-fp32", "available": True, "replicas": 1},
        "gpu": {"compute_type": "gpu-fp32", "available": False, "replicas": 1},
    }


async def test_every_spelling_of_a_model_describes_it(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        replies = [
            await http.get(path)
            for path in (
                f"/models/{CLASSIFIER}",
                f"/models/{CLASSIFIER}/",
                "/models/tiny%2Fclassifier",
                f"/models/{CLASSIFIER}/info",
            )
        ]
    assert [reply.json()["labels"] for reply in replies] == [
        ["NEGATIVE", "NEUTRAL", "POSITIVE"]
    ] * 4


@pytest.mark.parametrize("path", ["/models", "/v1/models"])
async def test_the_list_has_served_models_first_and_refused_ones_with_their_reason(
    path: str, tmp_path: Path
) -> None:
    (seal_tiny(tmp_path, EMBEDDER) / GRAPH_NAME).unlink()
    seal_tiny(tmp_path, CLASSIFIER, labels=("NO", "YES"))
    async with InProcess(tmp_path).client() as http:
        listed = (await http.get(path)).json()
    assert listed["object"] == "list"
    assert [(m["id"], m["object"], m["state"]) for m in listed["data"]] == [
        (CLASSIFIER, "model", "ready"),
        (EMBEDDER, "model", "refused"),
    ]
    assert GRAPH_NAME in listed["data"][1]["reason"]


async def test_while_nothing_runs_models_are_loading(tiny_store: Path) -> None:
    async with InProcess(tiny_store, running={}).client() as http:
        facts = (await http.get(f"/models/{EMBEDDER}")).json()
        health = await http.get(f"/models/{EMBEDDER}/health")
    assert facts["state"] == "loading"
    assert (health.status_code, health.json()["code"]) == (503, "model_loading")
    assert health.headers["retry-after"] == "20"


async def test_a_model_that_can_answer_is_healthy(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        assert (await http.get(f"/models/{EMBEDDER}/health")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/models/no/such", "/models/no/such/info", "/models/no/such/health"]
)
async def test_an_unknown_model_is_not_described(path: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        reply = await http.get(path)
    assert (reply.status_code, reply.json()["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("model_id", "name"), [("org/name", "org"), ("name", "hundredfold")])
def test_the_owner_is_the_organisation_in_front_of_the_slash(model_id: str, name: str) -> None:
    assert owner(model_id) == name


TAGGER, RANKER = "tiny/tagger", "tiny/ranker"


async def test_a_model_that_is_compiled_and_not_served_says_so(tmp_path: Path) -> None:
    seal_tiny(tmp_path, TAGGER, tasks=(TaskName.TOKEN_CLASSIFICATION,))
    ranking = (TaskName.TEXT_RANKING, TaskName.TEXT_CLASSIFICATION)
    seal_tiny(tmp_path, RANKER, labels=("SCORE",), tasks=ranking)
    async with InProcess(tmp_path, models=(TAGGER, RANKER)).client() as http:
        tagger, ranker = (await http.get("/models")).json()["data"]
        health = await http.get(f"/models/{TAGGER}/health")
    assert (tagger["state"], tagger["served_tasks"]) == ("not served", [])
    assert tagger["tasks"] == ["token-classification"]
    assert (ranker["state"], ranker["served_tasks"]) == ("ready", ["text-classification"])
    assert (health.status_code, health.json()["code"]) == (400, "wrong_task")


async def test_a_question_for_a_task_that_is_not_served_hears_its_name(tmp_path: Path) -> None:
    seal_tiny(tmp_path, TAGGER, tasks=(TaskName.TOKEN_CLASSIFICATION,))
    ranking = (TaskName.TEXT_RANKING, TaskName.TEXT_CLASSIFICATION)
    seal_tiny(tmp_path, RANKER, labels=("SCORE",), tasks=ranking)
    async with InProcess(tmp_path, models=(TAGGER, RANKER)).client() as http:
        refused = [
            await http.post(path, json={"inputs": "a"})
            for path in (
                f"/models/{TAGGER}",
                f"/pipeline/token-classification/{TAGGER}",
                f"/models/{RANKER}",
                f"/pipeline/text-ranking/{RANKER}",
            )
        ]
        classified = await http.post(
            f"/pipeline/text-classification/{RANKER}", json={"inputs": "a"}
        )
    assert [(r.status_code, r.json()["code"]) for r in refused] == [(400, "wrong_task")] * 4
    assert all("`token-classification`" in r.json()["error"] for r in refused[:2])
    assert all("`text-ranking`" in r.json()["error"] for r in refused[2:])
    assert all("serves: `text-classification`" in r.json()["error"] for r in refused[2:])
    assert classified.json()[0][0]["label"] == "SCORE"


async def test_the_default_model_is_one_that_is_served(tmp_path: Path) -> None:
    seal_tiny(tmp_path, TAGGER, tasks=(TaskName.TOKEN_CLASSIFICATION,))
    seal_tiny(tmp_path, EMBEDDER)
    async with InProcess(tmp_path, models=(TAGGER, EMBEDDER)).client() as http:
        reply = await http.post("/v1/embeddings", json={"input": "a"})
    assert reply.json()["model"] == EMBEDDER
