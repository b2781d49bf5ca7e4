"""Artifact of a tiny decoder, written without torch and without a build.

The model is a Llama of two layers. Its graph has the layout of onnxruntime-genai's model builder
and the input `logits_from`, the index of the first token with logits. Its tokenizer has single
bytes and a few merged pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from build_artifacts.types import FloatArray
from deployments.artifacts.generation_config import GenerationConfig, GenerationDefaults
from deployments.artifacts.manifest import (
    CHAT_TEMPLATE_NAME,
    TOKENIZER_NAME,
    ArtifactManifest,
    Candidate,
    ModelSource,
    Parity,
)
from deployments.artifacts.store import model_directory, set_latest
from deployments.artifacts.types import Device, TaskName
from tests.support.artifacts import NO_FILES_YET, seal

DECODER = "tiny/decoder"
GRAPH_NAME = "graphs/tiny/model.onnx"
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("in", "g"), ("Ġ", "the"), ("a", "n"), ("e", "r"))
HIDDEN, LAYERS, ATTENTION_HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 2, 4, 2, 16, 96


def seal_tiny_decoder(  # noqa: PLR0913  tests set one or two options each
    store: Path,
    model_id: str = DECODER,
    *,
    says: str = "",
    template: str = CHATML,
    added_tokens: Sequence[str] = (),
    max_tokens: int = 256,
    devices: tuple[Device, ...] = (Device.CPU,),
    defaults: GenerationDefaults | None = None,
    version: str | None = None,
) -> Path:
    """Write an artifact of a decoder with seeded random weights. Return its directory.

    The decoder generates noise, and rarely an end token. After a prompt that ends with a line feed,
    it generates the text `says`, if given, and ends its turn. No token may occur twice in `says`.
    """
    version = version or hashlib.sha256(model_id.encode()).hexdigest()[:12]
    directory = model_directory(store, model_id) / version
    (directory / GRAPH_NAME).parent.mkdir(parents=True)
    tokenizer = write_byte_tokenizer(directory / TOKENIZER_NAME, added_tokens)
    names = [TOKENIZER_NAME, GRAPH_NAME, CHAT_TEMPLATE_NAME]
    (directory / CHAT_TEMPLATE_NAME).write_text(template, encoding="utf-8")
    saying = [*tokenizer.encode("\n" + says).ids, tokenizer.token_to_id(TURN_END)] if says else []
    assert len(set(saying)) == len(saying), "a token occurs twice in `says`"
    export_model(directory / GRAPH_NAME, tokenizer.get_vocab_size(), max_tokens, saying)
    manifest = ArtifactManifest(
        id=model_id,
        version=version,
        tasks=(TaskName.TEXT_GENERATION,),
        architecture="LlamaForCausalLM",
        max_tokens=max_tokens,
        output_width=tokenizer.get_vocab_size(),
        generation_config=GenerationConfig(
            layers=LAYERS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            eos_token_ids=(tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END)),
            special_tokens={"bos_token": TURN, "eos_token": TURN_END, "pad_token": END},
            defaults=defaults or GenerationDefaults(),
        ),
        source=ModelSource(ref="seeded", revision="0123abc"),
        candidates=tuple(_candidate(device) for device in devices),
        files=dict.fromkeys(names, NO_FILES_YET),
        built_with={"onnx": onnx.__version__},
    )
    seal(directory, manifest)
    set_latest(store, model_id, version)
    return directory


def _candidate(device: Device) -> Candidate:
    exact = Parity(
        cosine_mean=1.0, cosine_worst=1.0, batched_cosine_worst=0.999999, top1_agreement=1.0
    )
    return Candidate(
        name=f"tiny-{device}", device=device, precision="fp32", graph=GRAPH_NAME, parity=exact
    )


def write_byte_tokenizer(path: Path, added_tokens: Sequence[str] = ()) -> Tokenizer:
    """Write a byte-level BPE with MERGES, three special tokens and `added_tokens` to `path`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, TURN, TURN_END])
    tokenizer.add_tokens(list(added_tokens))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def export_model(
    path: Path,
    vocabulary: int,
    max_tokens: int,
    saying: Sequence[int] = (),
    dtype: type[np.floating] = np.float32,
) -> None:
    """Write a random Llama that follows each token of `saying` with the next token of `saying`."""
    draw = _Draw()
    tables: dict[str, NDArray] = {
        "embedding": draw.matrix(vocabulary, HIDDEN) * 8,
        "ones": np.ones(HIDDEN, np.float32),
        "one": np.array([1]),
        "last": np.array(1),
        **_rotations(max_tokens),
    }
    nodes = [
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["sums"], keepdims=0),
        helper.make_node("Sub", ["sums", "one"], ["sums_less"]),
        helper.make_node("Cast", ["sums_less"], ["lengths"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask_shape"]),
        helper.make_node("Gather", ["mask_shape", "last"], ["room"]),
        helper.make_node("Cast", ["room"], ["total"], to=TensorProto.INT32),
        helper.make_node("Gather", ["embedding", "input_ids"], ["hidden0"]),
    ]
    for layer in range(LAYERS):
        nodes += _layer(layer, tables, draw)
    tables["head"] = draw.matrix(HIDDEN, vocabulary) * 3
    embedding = tables["embedding"]
    for now, then in pairwise(saying):
        tables["head"][:, then] += 6 * embedding[now] / np.linalg.norm(embedding[now])
    tables |= {"slice_end": np.array([2**31]), "slice_axis": np.array([1])}
    nodes += [
        _norm(f"hidden{LAYERS}", "normed"),
        helper.make_node("Slice", ["normed", "logits_from", "slice_end", "slice_axis"], ["wanted"]),
        helper.make_node("MatMul", ["wanted", "head"], ["logits"]),
    ]
    typed = {
        name: table.astype(dtype) if np.issubdtype(table.dtype, np.floating) else table
        for name, table in tables.items()
    }
    onnx.save(_model(nodes, typed, vocabulary), path)


class _Draw:
    """Source of seeded random matrices with the standard deviation 1 / sqrt(HIDDEN)."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(11)

    def matrix(self, rows: int, columns: int) -> FloatArray:
        drawn = self._random.standard_normal((rows, columns), dtype=np.float32)
        return drawn / np.float32(np.sqrt(HIDDEN))


def _layer(layer: int, tables: dict[str, NDArray], draw: _Draw) -> list[onnx.NodeProto]:
    """Build the nodes from `hidden{layer}` to `hidden{layer + 1}`."""
    wide = (ATTENTION_HEADS + 2 * KV_HEADS) * HEAD_DIM
    sizes = {"qkv": (HIDDEN, wide), "out": (HIDDEN, HIDDEN),
             "gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}  # fmt: skip
    weights = {name: f"{name}{layer}" for name in sizes}
    tables |= {weights[name]: draw.matrix(*size) for name, size in sizes.items()}

    def named(*names: str) -> list[str]:
        return [f"{name}_{layer}" for name in names]

    def product(of: str, weight: str, into: str) -> onnx.NodeProto:
        return helper.make_node("MatMul", [f"{of}_{layer}", weights[weight]], [f"{into}_{layer}"])

    parts = ("key", "value")
    past = [f"past_key_values.{layer}.{part}" for part in parts]
    present = [f"present.{layer}.{part}" for part in parts]
    return [
        _norm(f"hidden{layer}", f"a_{layer}"),
        product("a", "qkv", "b"),
        helper.make_node(
            "GroupQueryAttention",
            [f"b_{layer}", "", "", *past, "lengths", "total", "cos_cache", "sin_cache"],
            [f"c_{layer}", *present],
            domain="com.microsoft",
            num_heads=ATTENTION_HEADS,
            kv_num_heads=KV_HEADS,
            do_rotary=1,
        ),
        product("c", "out", "d"),
        helper.make_node("Add", [f"hidden{layer}", f"d_{layer}"], named("e")),
        _norm(f"e_{layer}", f"f_{layer}"),
        product("f", "gate", "g"),
        product("f", "up", "h"),
        helper.make_node("Sigmoid", named("g"), named("i")),
        helper.make_node("Mul", named("g", "i"), named("j")),
        helper.make_node("Mul", named("j", "h"), named("k")),
        product("k", "down", "l"),
        helper.make_node("Add", named("e", "l"), [f"hidden{layer + 1}"]),
    ]


def _norm(of: str, into: str) -> onnx.NodeProto:
    return helper.make_node("SimplifiedLayerNormalization", [of, "ones"], [into], epsilon=1e-5)


def _rotations(max_tokens: int) -> dict[str, NDArray]:
    """Return the RoPE cosines and sines, [max_tokens, HEAD_DIM / 2] each."""
    frequencies = 10_000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.arange(max_tokens)[:, None] * frequencies
    return {
        "cos_cache": np.cos(angles).astype(np.float32),
        "sin_cache": np.sin(angles).astype(np.float32),
    }


def _model(
    nodes: list[onnx.NodeProto], tables: dict[str, NDArray], vocabulary: int
) -> onnx.ModelProto:
    def value(name: str, kind: int, *shape: str | int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    memory = ("B", KV_HEADS, "M", HEAD_DIM)
    parts = [f"{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
    whole, real = TensorProto.INT64, helper.np_dtype_to_tensor_dtype(tables["head"].dtype)
    graph = helper.make_graph(
        nodes,
        "tiny",
        [
            value("input_ids", whole, "B", "T"),
            value("attention_mask", whole, "B", "M"),
            value("logits_from", whole, 1),
            *(value(f"past_key_values.{part}", real, *memory) for part in parts),
        ],
        [
            value("logits", real, "B", "L", vocabulary),
            *(value(f"present.{part}", real, *memory) for part in parts),
        ],
        [numpy_helper.from_array(table, name) for name, table in tables.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
