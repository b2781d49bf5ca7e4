"""A tiny model for every task, in one store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from tokenizers import Tokenizer

from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.artifacts.store import model_directory, set_latest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.engines.graph_io import MASK_POSITIONS
from deployments.tasks import find_head
from tests.support.artifacts import (
    CLASSIFIER,
    EMBEDDER,
    GRAPH_NAME,
    WIDTH,
    seal,
    seal_tiny,
    tiny_manifest,
    with_tasks,
    word_vectors,
)
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.engine_programs import write_model
from tests.support.tiny_encoders import tiny_tokenizer

NLI_MODEL = "tiny/nli"  # classifies entailment
RANKER = "tiny/ranker"
NER_MODEL = "tiny/tagger"
QA_MODEL = "tiny/reader"
FILL_MASK_MODEL = "tiny/guesser"
SPLADE_MODEL = "tiny/expander"
ENCODER_MODELS = (
    EMBEDDER,
    CLASSIFIER,
    NLI_MODEL,
    RANKER,
    NER_MODEL,
    QA_MODEL,
    FILL_MASK_MODEL,
    SPLADE_MODEL,
)
ALL_MODELS = (*ENCODER_MODELS, DECODER)


def seal_all_models(store: Path) -> Path:
    """Write artifacts of ALL_MODELS to `store`. Return `store`."""
    seal_tiny(store, EMBEDDER)
    seal_tiny(store, CLASSIFIER, labels=("NEGATIVE", "NEUTRAL", "POSITIVE"))
    nli_tasks = (TaskName.ZERO_SHOT_CLASSIFICATION, TaskName.TEXT_CLASSIFICATION)
    seal_tiny(store, NLI_MODEL, labels=("CONTRADICTION", "NEUTRAL", "ENTAILMENT"), tasks=nli_tasks)
    ranking_tasks = (TaskName.TEXT_RANKING, TaskName.TEXT_CLASSIFICATION)
    seal_tiny(store, RANKER, labels=("relevance",), tasks=ranking_tasks)
    seal_token_model(store, NER_MODEL, TaskName.TOKEN_CLASSIFICATION, ("O", "B-CITY", "I-CITY"))
    seal_token_model(store, QA_MODEL, TaskName.QUESTION_ANSWERING)
    seal_token_model(store, FILL_MASK_MODEL, TaskName.FILL_MASK)
    seal_token_model(store, SPLADE_MODEL, TaskName.SPARSE_EMBEDDINGS)
    seal_tiny_decoder(store)
    return store


def seal_token_model(
    store: Path, model_id: str, task: TaskName, labels: tuple[str, ...] = ()
) -> None:
    """Write an artifact of a model whose output for a token depends only on the token's id.

    A SPLADE model pools the outputs of a text's tokens. Most of its weights are 0.
    """
    manifest = tiny_manifest(model_id)
    directory = model_directory(store, model_id) / manifest.version
    tiny_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_NAME))
    vocabulary = tokenizer.get_vocab_size()
    head = find_head(task)
    width = {ModelHead.TOKENS: len(labels), ModelHead.SPAN: 2}.get(head, vocabulary)
    node = helper.make_node
    nodes = [node("Gather", ["vectors", "input_ids"], ["words"])]
    seen = "words"
    if head is ModelHead.MASKS:
        nodes.append(node("Reshape", ["words", "flat"], ["rows"]))
        nodes.append(node("Gather", ["rows", MASK_POSITIONS], ["seen"]))
        seen = "seen"
    nodes += [node("MatMul", [seen, "head"], ["scores"]), *_pool_nodes(head)]
    tables = {
        "vectors": word_vectors(vocabulary),
        "flat": np.array([-1, WIDTH]),
        "head": np.random.default_rng(9).standard_normal((WIDTH, width), dtype=np.float32),
        "last": np.array([-1]),
        "axis": np.array([1]),
        "threshold": np.array(5, np.float32),
        "unit": np.array(1, np.float32),
    }
    further = {ModelHead.MASKS: (MASK_POSITIONS,), ModelHead.SPARSE: ("attention_mask",)}
    inputs = ("input_ids", *further.get(head, ()))
    (directory / GRAPH_NAME).parent.mkdir(parents=True)
    write_model(directory / GRAPH_NAME, nodes, tables, inputs)
    about = {
        "labels": labels,
        "output_width": width,
        "normalize": False,
        "similarity": "dot",
        "mask_token": tokenizer.token_to_id("[MASK]") if head is ModelHead.MASKS else None,
    }
    seal(directory, with_tasks(manifest, task).model_copy(update=about))
    set_latest(store, model_id, manifest.version)


def _pool_nodes(head: ModelHead) -> list[onnx.NodeProto]:
    """Build the nodes from `scores` to `output`: for SPARSE log(1 + relu(x)), else nothing."""
    node = helper.make_node
    if head is not ModelHead.SPARSE:
        return [node("Identity", ["scores"], ["output"])]
    return [
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "last"], ["mask3"]),
        node("Sub", ["scores", "threshold"], ["sparse"]),
        node("Mul", ["sparse", "mask3"], ["seen_scores"]),
        node("ReduceMax", ["seen_scores", "axis"], ["largest"], keepdims=0),
        node("Relu", ["largest"], ["positive"]),
        node("Add", ["positive", "unit"], ["shifted"]),
        node("Log", ["shifted"], ["output"]),
    ]
