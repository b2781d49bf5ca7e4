"""Tiny artifacts of encoders, written without torch and without a build."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from deployments.artifacts.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    ArtifactManifest,
    Candidate,
    FileDigest,
    ModelSource,
    Parity,
    sealed_ns,
)
from deployments.artifacts.migration import PREVIOUS
from deployments.artifacts.store import file_sha256, model_directory, set_latest
from deployments.artifacts.types import Device, ModelHead, TaskName
from deployments.engines.graph_io import TOKENS_OUTPUT
from deployments.messages import ModelRef
from deployments.plan import changes
from deployments.plan.plan import Plan, Refusal
from deployments.tasks import find_head
from tests.support.tiny_encoders import tiny_tokenizer

EMBEDDER = "tiny/embedder"
CLASSIFIER = "tiny/classifier"
WIDTH = 8
MAX_TOKENS = 16
TINY_SEED = 7  # of the word vectors of `seal_tiny`
GRAPH_NAME = "graphs/tiny.onnx"
NO_FILES_YET = FileDigest(sha256="0" * 64, size=0)


def seal_tiny(
    store: Path,
    model_id: str,
    *,
    labels: tuple[str, ...] = (),
    devices: tuple[Device, ...] = (Device.CPU, Device.GPU),
    nan_word: str | None = None,
    tasks: tuple[TaskName, ...] = (),
) -> Path:
    """Write an artifact of a model that averages random word vectors. Return its directory.

    With `labels` the model is a classifier, unless `tasks` are given. Without `labels` its graph
    also returns token vectors. Texts with `nan_word` get NaN outputs. The weights depend on the
    vocabulary only, so that every run has the same outputs.
    """
    manifest = tiny_manifest(model_id, labels=labels, devices=devices)
    if tasks:
        manifest = with_tasks(manifest, *tasks)
    return _seal_words(store, manifest, labels=len(labels), nan_word=nan_word)


def seal_tiny_version(
    store: Path, model_id: str, version: str, *, same_weights: bool = False, **fields: object
) -> Path:
    """Write another version of an embedder and make it the latest one.

    Its weights are others, unless `same_weights`. `fields` are fields of its manifest.
    """
    manifest = tiny_manifest(model_id).model_copy(update={"version": version, **fields})
    return _seal_words(store, manifest, seed=TINY_SEED if same_weights else int(version, 16))


def refuse_version(store: Path, model_id: str, version: str) -> Plan:
    """Refuse the present seal of a version, as after a failed trial. Return the new plan."""
    sealed = sealed_ns(model_directory(store, model_id) / version)
    refusal = Refusal(reason="its graph does not open", sealed_ns=sealed)
    return changes.refuse(store, ModelRef(model_id, version), refusal)


def _seal_words(
    store: Path,
    manifest: ArtifactManifest,
    *,
    labels: int = 0,
    nan_word: str | None = None,
    seed: int = TINY_SEED,
) -> Path:
    directory = model_directory(store, manifest.id) / manifest.version
    tiny_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_NAME))
    vectors = word_vectors(tokenizer.get_vocab_size(), seed)
    if nan_word is not None:
        vectors[tokenizer.token_to_id(nan_word)] = np.nan
    write_graph(directory / GRAPH_NAME, vectors, labels=labels, unpooled=not labels)
    seal(directory, manifest)
    set_latest(store, manifest.id, manifest.version)
    return directory


def tiny_manifest(
    model_id: str = "tiny/model",
    *,
    labels: tuple[str, ...] = (),
    devices: tuple[Device, ...] = (Device.CPU, Device.GPU),
) -> ArtifactManifest:
    """Build the manifest of a tiny model without the digests of its files."""
    embedding = (TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY)
    return ArtifactManifest(
        id=model_id,
        version=hashlib.sha256(model_id.encode()).hexdigest()[:12],
        tasks=(TaskName.TEXT_CLASSIFICATION,) if labels else embedding,
        architecture="WordAverage",
        max_tokens=MAX_TOKENS,
        output_width=len(labels) or WIDTH,
        labels=labels,
        problem_type="single_label" if labels else None,
        pooling=None if labels else "mean",
        normalize=not labels,
        source=ModelSource(ref="seeded", revision="0123abc"),
        candidates=tuple(tiny_candidate(device) for device in devices),
        files={TOKENIZER_NAME: NO_FILES_YET, GRAPH_NAME: NO_FILES_YET},
        built_with={"onnx": onnx.__version__},
    )


def with_tasks(manifest: ArtifactManifest, *tasks: str) -> ArtifactManifest:
    """Copy a manifest with other tasks. Set the fields that the head of the first task needs."""
    head = find_head(tasks[0])
    has_labels = head in (ModelHead.LABELS, ModelHead.TOKENS)
    return manifest.model_copy(
        update={
            "tasks": tasks,
            "labels": (manifest.labels or ("O", "NAME")) if has_labels else (),
            "problem_type": "single_label" if head is ModelHead.LABELS else None,
            "pooling": {ModelHead.VECTOR: "mean", ModelHead.SPARSE: "splade"}.get(head),
            "mask_token": 4 if head is ModelHead.MASKS else None,
        }
    )


def tiny_candidate(device: Device) -> Candidate:
    """Build a candidate. The candidates of all devices share one fp32 graph."""
    exact = Parity(cosine_mean=1.0, cosine_worst=1.0, batched_cosine_worst=0.999999)
    return Candidate(
        name=f"tiny-{device}", device=device, precision="fp32", graph=GRAPH_NAME, parity=exact
    )


def seal(directory: Path, manifest: ArtifactManifest) -> None:
    """Write `manifest` to `directory`, with the digests of the files in `directory`."""
    files = {
        name: FileDigest(
            sha256=file_sha256(directory / name), size=(directory / name).stat().st_size
        )
        for name in manifest.files
    }
    _write_manifest(directory, manifest.model_copy(update={"files": files}))


def _write_manifest(directory: Path, manifest: ArtifactManifest) -> None:
    """Write a manifest with the exact time of the write, because versions are sorted by it.

    The kernel alone would give files of the same few milliseconds the same time.
    """
    path = directory / MANIFEST_NAME
    path.write_bytes(manifest.to_json())
    now_ns = time.time_ns()
    os.utime(path, ns=(now_ns, now_ns))


def word_vectors(vocabulary: int, seed: int = 7) -> NDArray[np.float32]:
    """Return a seeded random table of word vectors, [vocabulary, WIDTH]."""
    return np.random.default_rng(seed).standard_normal((vocabulary, WIDTH), dtype=np.float32)


def write_graph(
    path: Path,
    vectors: NDArray[np.float32],
    *,
    labels: int = 0,
    token_types: bool = False,
    unpooled: bool = False,
) -> None:
    """Write a graph that outputs the mean vector [B, WIDTH] of the unmasked tokens.

    With `labels` it outputs logits [B, labels] of this vector instead. With `unpooled` a second
    output holds the token vectors. With `token_types` the graph also takes token_type_ids and
    adds the sum of each item's ids to the first output. So nonzero ids change the output.
    """
    node = helper.make_node
    tables = {"vectors": vectors, "last": np.array([-1]), "axis": np.array([1])}
    nodes = [
        node("Gather", ["vectors", "input_ids"], ["words"]),
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "last"], ["mask3"]),
        node("Mul", ["words", "mask3"], ["seen"]),
        node("ReduceSum", ["seen", "axis"], ["total"], keepdims=0),
        node("ReduceSum", ["mask", "axis"], ["count"], keepdims=1),
        node("Div", ["total", "count"], ["mean"]),
    ]
    inputs = ["input_ids", "attention_mask"]
    if labels:
        tables["head"] = np.random.default_rng(8).standard_normal((WIDTH, labels), dtype=np.float32)
        nodes.append(node("MatMul", ["mean", "head"], ["logits"]))
    if token_types:
        inputs.append("token_type_ids")
        nodes.append(node("Cast", ["token_type_ids"], ["types"], to=TensorProto.FLOAT))
        nodes.append(node("ReduceSum", ["types", "axis"], ["type_sum"], keepdims=1))
        nodes.append(node("Add", [nodes[-3].output[0], "type_sum"], ["typed"]))
    nodes.append(node("Identity", [nodes[-1].output[0]], ["output"]))
    outputs = {"output": ["B", labels or WIDTH]}
    if unpooled:
        nodes.append(node("Identity", ["words"], [TOKENS_OUTPUT]))
        outputs[TOKENS_OUTPUT] = ["B", "T", WIDTH]
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(_model(nodes, tables, inputs, outputs), path)


def _model(
    nodes: list[onnx.NodeProto],
    tables: dict[str, NDArray],
    inputs: list[str],
    outputs: Mapping[str, Sequence[str | int]],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "T"]) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in outputs.items()],
        [numpy_helper.from_array(table, name) for name, table in tables.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def replace_sealed_file(directory: Path, name: str, content: bytes) -> None:
    """Replace a file of an artifact and update its digest in the manifest."""
    (directory / name).write_bytes(content)
    manifest = ArtifactManifest.model_validate_json((directory / MANIFEST_NAME).read_bytes())
    sealed = FileDigest(sha256=file_sha256(directory / name), size=len(content))
    _write_manifest(
        directory, manifest.model_copy(update={"files": {**manifest.files, name: sealed}})
    )


def seal_without_token_vectors(store: Path, model_id: str) -> Path:
    """Write an artifact of an embedder whose graph has no token output. Return its directory."""
    directory = seal_tiny(store, model_id)
    vocabulary = Tokenizer.from_file(str(directory / TOKENIZER_NAME)).get_vocab_size()
    write_graph(directory / GRAPH_NAME, word_vectors(vocabulary))
    replace_sealed_file(directory, GRAPH_NAME, (directory / GRAPH_NAME).read_bytes())
    return directory


def make_previous(artifact: Path) -> None:
    """Rewrite the manifest in the format of the previous release, schema 4."""
    path = artifact / MANIFEST_NAME
    raw = json.loads(path.read_bytes())
    raw["schema_version"] = PREVIOUS
    for candidate in raw["candidates"]:
        candidate["options"]["arena"] = False
    path.write_text(json.dumps(raw))
