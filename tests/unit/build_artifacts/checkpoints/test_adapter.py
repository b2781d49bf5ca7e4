"""Adapters of directories: labels with their problem type, and what no merge can read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from build_artifacts.checkpoints.adapter import PROBLEM_TYPES, read_adapter
from build_artifacts.errors import SourceNotFound, UnsupportedModel
from tests.support.tiny_encoders import write_json


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "task_type": "SEQ_CLS"})
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "adapter_model.safetensors")
    return tmp_path


@pytest.mark.parametrize("problem_type", [*PROBLEM_TYPES, None])
def test_labels_have_a_problem_type(adapter: Path, problem_type: str | None) -> None:
    write_json(adapter / "labels.json", {"labels": ["A", "B"], "problem_type": problem_type})
    read = read_adapter(adapter)
    assert (read.labels, read.problem_type) == (("A", "B"), problem_type)


def test_list_of_labels_states_no_problem_type(adapter: Path) -> None:
    write_json(adapter / "labels.json", ["A", "B"])
    read = read_adapter(adapter)
    assert (read.labels, read.problem_type) == (("A", "B"), None)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"labels": ["A"], "problem_type": "multi_label"}, "`problem_type` in `labels.json` is"),
        ({"labels": ["A"], "problem": "regression"}, "has the unknown field `problem`"),
        ({"problem_type": "regression"}, "is not a list of strings"),
        ([1], "is not a list of strings"),
    ],
)
def test_other_contents_of_labels_are_refused(adapter: Path, labels: object, reason: str) -> None:
    write_json(adapter / "labels.json", labels)
    with pytest.raises(UnsupportedModel, match=reason):
        read_adapter(adapter)


def test_problem_type_of_token_labels_is_refused(adapter: Path) -> None:
    write_json(adapter / "adapter_config.json", {"peft_type": "LORA", "task_type": "TOKEN_CLS"})
    write_json(adapter / "labels.json", {"labels": ["A"], "problem_type": PROBLEM_TYPES[1]})
    with pytest.raises(UnsupportedModel, match="trained for token-classification"):
        read_adapter(adapter)


def test_adapter_in_several_files_is_refused(adapter: Path) -> None:
    name = "adapter_model-00001-of-00001.safetensors"
    (adapter / "adapter_model.safetensors").rename(adapter / name)
    index = {"weight_map": {"a": name}}
    write_json(adapter / "adapter_model.safetensors.index.json", index)
    with pytest.raises(UnsupportedModel, match="weights of the adapter are in several files"):
        read_adapter(adapter)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("acme/lora", "hf download acme/lora --local-dir DIR"),
        ("acme/lora@v1", "hf download acme/lora --revision v1 --local-dir DIR"),
    ],
)
def test_adapter_of_the_hub_is_downloaded_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceNotFound, match=r"no `adapter_config\.json` in `acme/lora") as caught:
        read_adapter(Path(name))
    assert caught.value.hint == f"pass the DIR of `{command}`"


def test_directory_without_an_adapter_is_no_model_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound) as caught:
        read_adapter(tmp_path)
    assert caught.value.hint == "pass a directory saved by peft"
