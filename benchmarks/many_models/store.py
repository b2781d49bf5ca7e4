"""Stores of tiny models: hard links of one artifact under distinct ids, or versions of a model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from deployments.artifacts.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    ArtifactManifest,
    Candidate,
    FileDigest,
    ModelSource,
    Parity,
)
from deployments.artifacts.store import file_sha256, model_directory, set_latest
from deployments.artifacts.types import Device, TaskName

VERSION = "0123456789ab"
GRAPH_NAME = "graphs/cpu.onnx"
WIDTH = 32
WORDS = 256
MAX_TOKENS = 64


def model_name(number: int) -> str:
    return f"many/model-{number:05d}"


def write_tiny_models(store: Path, count: int) -> int:
    """Write artifacts of `count` models with WORDS word vectors. Return the bytes of a graph."""
    first = model_directory(store, model_name(0)) / VERSION
    _write_tokenizer(first / TOKENIZER_NAME)
    _write_graph(first / GRAPH_NAME)
    manifest = _seal(first, model_name(0))
    for number in range(1, count):
        link_model(first, manifest, store, model_name(number))
    return manifest.files[GRAPH_NAME].size


def write_version(store: Path, model_id: str, version: str, seed: int) -> None:
    """Write a version with word vectors drawn from `seed`, and make it the latest version."""
    directory = model_directory(store, model_id) / version
    _write_tokenizer(directory / TOKENIZER_NAME)
    _write_graph(directory / GRAPH_NAME, seed)
    _seal(directory, model_id)


def link_model(sealed: Path, manifest: ArtifactManifest, store: Path, model_id: str) -> None:
    """Add the artifact in `sealed` to `store` as model `model_id`, with hard links to its files."""
    directory = model_directory(store, model_id) / manifest.version
    for name in manifest.files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(sealed / name, directory / name)
    other = manifest.model_copy(update={"id": model_id})
    (directory / MANIFEST_NAME).write_bytes(other.to_json())
    set_latest(store, model_id, manifest.version)


def _seal(directory: Path, model_id: str) -> ArtifactManifest:
    exact = Parity(cosine_mean=1.0, cosine_worst=1.0, batched_cosine_worst=1.0)
    candidate = Candidate(
        name="cpu-fp32", device=Device.CPU, precision="fp32", graph=GRAPH_NAME, parity=exact
    )
    files = {
        name: FileDigest(
            sha256=file_sha256(directory / name), size=(directory / name).stat().st_size
        )
        for name in (TOKENIZER_NAME, GRAPH_NAME)
    }
    manifest = ArtifactManifest(
        id=model_id,
        version=directory.name,
        tasks=(TaskName.FEATURE_EXTRACTION,),
        architecture="WordAverage",
        max_tokens=MAX_TOKENS,
        output_width=WIDTH,
        pooling="mean",
        normalize=True,
        source=ModelSource(ref="generated", revision="none"),
        candidates=(candidate,),
        files=files,
        built_with={"onnx": onnx.__version__},
    )
    (directory / MANIFEST_NAME).write_bytes(manifest.to_json())
    set_latest(directory.parents[1], model_id, directory.name)
    return manifest


def _write_tokenizer(path: Path) -> None:
    words = ["[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(WORDS - 3))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def _write_graph(path: Path, seed: int = 0) -> None:
    """Write a graph that returns the masked mean of seeded word vectors, [B, WIDTH]."""
    node = helper.make_node
    vectors = np.random.default_rng(seed).standard_normal((WORDS, WIDTH), dtype=np.float32)
    nodes = [
        node("Gather", ["vectors", "input_ids"], ["words"]),
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "last"], ["mask3"]),
        node("Mul", ["words", "mask3"], ["seen"]),
        node("ReduceSum", ["seen", "axis"], ["total"], keepdims=0),
        node("ReduceSum", ["mask", "axis"], ["count"], keepdims=1),
        node("Div", ["total", "count"], ["output"]),
    ]
    tables = {"vectors": vectors, "last": np.array([-1]), "axis": np.array([1])}
    names = ("input_ids", "attention_mask")
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["B", "T"]) for n in names]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["B", WIDTH])
    initializers = [numpy_helper.from_array(table, name) for name, table in tables.items()]
    graph = helper.make_graph(nodes, "many", inputs, [output], initializers)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path)
