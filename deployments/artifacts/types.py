"""Vocabulary of stored models: tasks, heads, devices, precisions and engines."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Base class of values stored as JSON. Instances are immutable; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskName(StrEnum):
    """Hugging Face names of the tasks that other code names.

    The name of another task in `deployments.tasks.TASKS` may be a plain string.
    """

    FEATURE_EXTRACTION = "feature-extraction"
    SENTENCE_SIMILARITY = "sentence-similarity"
    TEXT_CLASSIFICATION = "text-classification"
    ZERO_SHOT_CLASSIFICATION = "zero-shot-classification"
    TEXT_RANKING = "text-ranking"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    FILL_MASK = "fill-mask"
    TEXT_GENERATION = "text-generation"
    TEXT2TEXT_GENERATION = "text2text-generation"
    SUMMARIZATION = "summarization"
    TRANSLATION = "translation"
    # The Hugging Face hub does not have this name. There, feature-extraction returns one vector per
    # text or one per token, depending on the model. This task always returns one per token.
    TOKEN_EMBEDDINGS = "token-embeddings"
    # Nor this one: there, sparse encoders have the tag feature-extraction or fill-mask.
    SPARSE_EMBEDDINGS = "sparse-embeddings"


# Tasks of encoder-decoder models, the most general first. Decoder-only models have TEXT_GENERATION.
TEXT2TEXT_TASKS = (TaskName.TEXT2TEXT_GENERATION, TaskName.SUMMARIZATION, TaskName.TRANSLATION)
GENERATIVE_TASKS = (TaskName.TEXT_GENERATION, *TEXT2TEXT_TASKS)


class ModelHead(StrEnum):
    """Output of a graph for an item of T tokens. W is `output_width` of the manifest."""

    # [W], pooled over the item's tokens, not normalized; unpooled: [T, `token_width`]
    VECTOR = "vector"
    LABELS = "labels"  # [W], logits of the labels
    TOKENS = "tokens"  # [T, W], logits of the labels of each token
    SPAN = "span"  # [T, 2], logits of a span's start and end
    MASKS = "masks"  # [M, W], logits over the vocabulary at the item's M mask tokens
    SPARSE = "sparse"  # [W], weights of the vocabulary, none below 0 and most of them 0
    NEXT_TOKEN = "next-token"  # [W], logits over the vocabulary for the next token


class Device(StrEnum):
    """Kind of hardware for which a graph is built."""

    CPU = "cpu"
    GPU = "gpu"


Precision = Literal["fp32", "bf16", "fp16", "int8", "int4", "nf4"]  # nf4: bitsandbytes, 4 bits
Dtype = Literal["float32", "float16", "bfloat16"]
# Names of the float precisions in torch and NumPy.
DTYPE_NAMES: Mapping[str, Dtype] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TruncationSide = Literal["left", "right"]  # side of a long text that is removed
EngineName = str  # a key of deployments.engines.ENGINES
KvCacheDtype = Literal["int8"]
# sdpa: fused kernels of torch; separate products in layers with a soft cap or sinks, which these
# kernels do not support. flash: kernels of the package `flash_attn`. eager: separate products.
Attention = Literal["sdpa", "flash", "eager"]
