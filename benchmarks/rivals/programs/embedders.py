"""Functions that embed texts with the libraries of rivals, as their documentation recommends.

This module runs in the environment of a rival and imports nothing of this project. Settings without
a recommendation, such as the number of threads, keep the library's defaults.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PADDED_TOKENS = 512

NormalizedVectors = NDArray[np.float32]  # [texts, width], with an L2 norm of 1 per text
Embed = Callable[[list[str]], NormalizedVectors]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line that the scripts of embedding servers share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=tuple(ENGINES), required=True)
    parser.add_argument("--model", type=Path, required=True, help="directory or graph file")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of a graph file")
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_args()


def open_embedder(engine: str, model: Path, tokenizer: Path | None) -> Embed:
    """Open the model. Engines that run a graph file require `tokenizer`."""
    return ENGINES[engine](model, tokenizer)


def open_pipeline(model: Path, _tokenizer: Path | None) -> Embed:
    """Open transformers' pipeline with its defaults and mean pooling over all tokens."""
    from transformers import pipeline

    extract = pipeline("feature-extraction", model=str(model))

    def embed(texts: list[str]) -> NormalizedVectors:
        outputs = extract(texts, return_tensors=True, tokenize_kwargs={"truncation": True})
        return normalize(np.stack([tokens[0].numpy().mean(axis=0) for tokens in outputs]))

    return embed


def open_padded_pipeline(model: Path, _tokenizer: Path | None) -> Embed:
    """Open transformers' pipeline with padded texts. Mean pooling ignores the padding."""
    from transformers import pipeline

    extract = pipeline("feature-extraction", model=str(model))
    padding = {"padding": "max_length", "truncation": True, "max_length": PADDED_TOKENS}

    def embed(texts: list[str]) -> NormalizedVectors:
        outputs = extract(texts, return_tensors=True, tokenize_kwargs=padding)
        lengths = [len(ids) for ids in extract.tokenizer(texts)["input_ids"]]
        rows = zip(outputs, lengths, strict=True)
        return normalize(np.stack([tokens[0, :n].numpy().mean(axis=0) for tokens, n in rows]))

    return embed


def open_sentence_transformers(model: Path, _tokenizer: Path | None) -> Embed:
    from sentence_transformers import SentenceTransformer

    transformer = SentenceTransformer(str(model), device="cpu")

    def embed(texts: list[str]) -> NormalizedVectors:
        vectors: NormalizedVectors = transformer.encode(texts, normalize_embeddings=True)
        return vectors

    return embed


def open_fastembed(model: Path, _tokenizer: Path | None) -> Embed:
    """Open fastembed with a custom model. `model` holds an fp32 graph and the tokenizer."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    name = "local/model"
    TextEmbedding.add_custom_model(
        model=name,
        pooling=PoolingType.DISABLED,  # the graph already pools
        normalization=True,
        sources=ModelSource(hf=name),
        dim=0,
        model_file="model.onnx",
    )
    embedding = TextEmbedding(name, specific_model_path=str(model))
    return lambda texts: np.stack(list(embedding.embed(texts)))


def open_onnxruntime(model: Path, tokenizer: Path | None) -> Embed:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    (output, *_) = (value.name for value in session.get_outputs())
    tokenize = open_tokenizer(tokenizer, names)
    return lambda texts: normalize(session.run([output], tokenize(texts))[0])


def open_openvino(model: Path, tokenizer: Path | None) -> Embed:
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU")
    names = [value.any_name for value in compiled.inputs]
    tokenize = open_tokenizer(tokenizer, names)
    local = threading.local()  # each thread needs its own infer request

    def embed(texts: list[str]) -> NormalizedVectors:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        return normalize(local.request.infer(tokenize(texts), share_inputs=True)[0])

    return embed


def open_tokenizer(file: Path | None, names: list[str]) -> Callable[[list[str]], dict[str, Any]]:
    """Return a function that tokenizes texts to the model inputs `names`, int64 [texts, tokens]."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()  # texts fit the model, but the file may set a lower limit
    tokenizer.enable_padding()  # pads to the longest text of a batch

    def tokenize(texts: list[str]) -> dict[str, Any]:
        rows = tokenizer.encode_batch(texts)
        arrays = {
            "input_ids": np.array([row.ids for row in rows], np.int64),
            "attention_mask": np.array([row.attention_mask for row in rows], np.int64),
            "token_type_ids": np.array([row.type_ids for row in rows], np.int64),
        }
        return {name: arrays[name] for name in names}

    return tokenize


def normalize(vectors: NDArray[np.float32]) -> NormalizedVectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    normalized: NormalizedVectors = vectors / np.maximum(lengths, 1e-12)
    return normalized


ENGINES: Mapping[str, Callable[[Path, Path | None], Embed]] = {
    "pipeline": open_pipeline,
    "pipeline-padded": open_padded_pipeline,
    "sentence-transformers": open_sentence_transformers,
    "fastembed": open_fastembed,
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
}
