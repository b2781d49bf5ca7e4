"""Models of the hub are refused by their small files, before the weights are downloaded."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from build_artifacts.errors import BuildError, UnsafeSource, UnsupportedModel
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.progress import BuildProgress
from build_artifacts.sources.hub import HubListing, resolve_hub_model
from tests.support.tiny_encoders import write_json

WEIGHTS = ".safetensors"


class PartialHub:
    """Hub with the model in `whole`. Its cache `directory` has what was downloaded."""

    def __init__(self, whole: Path, directory: Path) -> None:
        self.whole, self.directory = whole, directory
        self.fetched: list[str] = []

    def listing(self, model_id: str, revision: str | None) -> HubListing:
        paths = sorted(path for path in self.whole.rglob("*") if path.is_file())
        return HubListing("c0ffee" * 6, tuple(str(p.relative_to(self.whole)) for p in paths))

    def download(self, model_id: str, commit: str, files: list[str]) -> Path:
        for name in files:
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.whole / name, self.directory / name)
        self.fetched += files
        return self.directory

    @property
    def fetched_weights(self) -> list[str]:
        return [name for name in self.fetched if name.endswith(WEIGHTS)]


@pytest.fixture
def hub(tmp_path: Path, embedding_source: Path) -> PartialHub:
    return PartialHub(shutil.copytree(embedding_source, tmp_path / "whole"), tmp_path / "cache")


def test_weights_come_last(hub: PartialHub) -> None:
    checkpoint = resolve_hub_model("acme/tiny", hub)
    assert hub.fetched_weights == ["model.safetensors"]
    first_weights = hub.fetched.index("model.safetensors")
    assert set(hub.fetched[:first_weights]) >= {"config.json", "tokenizer.json", "modules.json"}
    assert (checkpoint.weights / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("config", "error", "reason"),
    [
        ({"model_type": "x", "auto_map": {"AutoModel": "m.M"}}, UnsafeSource, "remote code"),
        ({"model_type": "bert", "num_labels": 10**9}, UnsupportedModel, "`num_labels` is"),
        ({"model_type": "no_such_type"}, UnsupportedModel, "does not support `config.json`"),
        ({"model_type": "longformer"}, UnsupportedModel, "`longformer` cannot be exported"),
    ],
)
def test_refused_model_costs_no_download_of_weights(
    hub: PartialHub,
    tmp_path: Path,
    config: dict[str, object],
    error: type[BuildError],
    reason: str,
) -> None:
    write_json(hub.whole / "config.json", config)
    request = BuildRequest(ref="acme/tiny", store=tmp_path / "store")
    with pytest.raises(error, match=reason):
        build(request, BuildProgress(io.StringIO()), hub=hub)
    assert hub.fetched
    assert hub.fetched_weights == []


def test_pickled_model_of_the_hub_is_converted_with_its_class(hub: PartialHub) -> None:
    (hub.whole / "model.safetensors").rename(hub.whole / "pytorch_model.bin")
    (hub.whole / "modules.json").unlink()
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    write_json(hub.whole / "config.json", config)
    with pytest.raises(UnsafeSource, match="`acme/tiny` has pickled weights only") as caught:
        resolve_hub_model("acme/tiny", hub)
    assert "`transformers.BertForSequenceClassification.from_pretrained(DIR)" in caught.value.hint
    assert hub.fetched == ["config.json"]


@pytest.mark.parametrize("has_config", [True, False])
def test_adapter_of_the_hub_is_no_source(hub: PartialHub, tmp_path: Path, has_config: bool) -> None:
    hub.whole = tmp_path / "adapter"
    write_json(hub.whole / "adapter_config.json", {"base_model_name_or_path": "org/base"})
    (hub.whole / "adapter_model.safetensors").write_bytes(b"weights")
    if has_config:
        write_json(hub.whole / "config.json", {"model_type": "bert"})
    reason = "`acme/lora@v1` has a LoRA adapter of `org/base`, and no model"
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        resolve_hub_model("acme/lora@v1", hub)
    assert "`hf download acme/lora --revision v1 --local-dir DIR`" in caught.value.hint
    assert hub.fetched == ["adapter_config.json"]
