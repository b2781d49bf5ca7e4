from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.demo import ALL_DEMO_MODELS, DEMO_MODELS, DemoModel
from build_artifacts.evaluation import EvaluatedModel, load_evaluation
from build_artifacts.evaluation.squad import read_questions
from deployments.artifacts.types import Device, TaskName
from deployments.tasks import find_head
from tests.support.tiny_encoders import tiny_tokenizer

SERVE_CONFIG = Path(__file__).parents[3] / "serve_config.yaml"
ADAPTED = [model for model in ALL_DEMO_MODELS if model.adapter]
EVALUATED = [model for model in ALL_DEMO_MODELS if model.evaluation]


@pytest.mark.parametrize("model", ADAPTED, ids=lambda model: model.id)
def test_demo_adapter_matches_head_of_model(model: DemoModel) -> None:
    assert model.adapter is not None
    assert find_head(read_adapter(model.adapter).task) is find_head(model.task)


@pytest.mark.parametrize("model", EVALUATED, ids=lambda model: model.id)
def test_demo_evaluation_data_loads(model: DemoModel, tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    under_test = EvaluatedModel(directory=tmp_path, max_tokens=512, labels=read_labels(model))
    assert model.evaluation is not None
    assert len(load_evaluation(model.evaluation, model.task, under_test).items) > 90


def read_labels(model: DemoModel) -> tuple[str, ...]:
    """Return the labels of the adapter. Without an adapter, return those of the evaluation data."""
    if model.adapter is not None:
        return read_adapter(model.adapter).labels
    assert model.evaluation is not None
    lines = model.evaluation.read_text(encoding="utf-8").splitlines()
    return tuple(sorted({tag for line in lines for tag in json.loads(line)["tags"]}))


def test_demo_questions_have_one_answer_in_context() -> None:
    (model,) = (m for m in DEMO_MODELS if m.task is TaskName.QUESTION_ANSWERING)
    assert model.evaluation is not None
    questions = read_questions(model.evaluation)
    assert len({question.question for question in questions}) == len(questions)
    for question in questions:
        (gold,) = question.golds
        assert gold in question.context


def test_serve_config_lists_demo_models() -> None:
    config = yaml.safe_load(SERVE_CONFIG.read_text(encoding="utf-8"))
    served = config["applications"][0]["args"]["models"]
    assert [model["id"] for model in served] == [model.id for model in DEMO_MODELS]


def test_all_demo_models_have_ids_of_their_own() -> None:
    assert len({model.id for model in ALL_DEMO_MODELS}) == len(ALL_DEMO_MODELS)


@pytest.mark.parametrize("model", ALL_DEMO_MODELS, ids=lambda model: model.id)
def test_gpu_adds_candidates_and_a_version_of_its_own(model: DemoModel, tmp_path: Path) -> None:
    plain, with_gpu = model.request(tmp_path).recipe, model.request(tmp_path, with_gpu=True).recipe
    assert with_gpu.candidates_for(Device.CPU) == plain.candidates_for(Device.CPU)
    assert [recipe.name for recipe in with_gpu.candidates_for(Device.GPU)] == ["gpu-fp16-bound"]
    on_gpu = [recipe.name for recipe in with_gpu.decoders if recipe.device is Device.GPU]
    assert on_gpu == ["gpu-fp16", "gpu-fp16-torch", "gpu-bf16-torch"]
    if model.adapter is None:
        assert model.version(tmp_path) != model.version(tmp_path, with_gpu=True)
