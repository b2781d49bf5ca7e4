"""A checkpoint becomes a torch program that reads and writes rows of memory where they lie.

transformers' own model is traced, with a cache that is the memory, a mask that says how much of
each row is valid, and attention that takes keys and values as they are kept. What the program reads
and answers is told in deployments/engines/torch_decoder.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from build_artifacts.checkpoints.facts import ModelFacts
from build_artifacts.checkpoints.models import TorchModel, load_model
from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipe import Attention, DecoderRecipe
from build_artifacts.steps.program import write_traced
from deployments.manifest import Head

if TYPE_CHECKING:
    import torch

_DTYPES: Mapping[str, Literal["float32", "float16"]] = {"fp32": "float32", "fp16": "float16"}
# What transformers is to call an attention by.
_ATTENTIONS: Mapping[Attention, str] = {"sdpa": "sdpa-in-rows", "eager": "eager"}
_MOST_ROWS = 4_096
# An example of which no two sides are equal, or they would be taken for the same.
_ROWS, _TOKENS, _WANTED, _ROOM = 2, 5, 3, 11


def export_program(weights: Path, facts: ModelFacts, recipe: DecoderRecipe, path: Path) -> None:
    """Write the program of the checkpoint in `weights` to `path`. Raises UnsupportedModel."""
    _check(facts, recipe)
    model = load_model(weights, head=Head.NEXT_TOKEN, dtype=_DTYPES[recipe.precision])
    _check_window(model, facts)
    write_traced(lambda: _traced(model, facts, recipe.attention), facts, path, in_place=True)


def _check(facts: ModelFacts, recipe: DecoderRecipe) -> None:
    if facts.generating.source is not None:
        raise UnsupportedModel(
            f"there is no torch program of models with an encoder ({recipe.name})",
            hint="their ONNX graphs are not affected",
        )
    if recipe.precision not in _DTYPES or recipe.options or recipe.rowwise:
        raise UnsupportedModel(
            f"there is no torch program in {recipe.precision}, or of options of a graph's builder "
            f"({recipe.name})",
            hint=f"these are written: {', '.join(_DTYPES)}",
        )


def _check_window(model: TorchModel, facts: ModelFacts) -> None:
    window = getattr(model.config, "sliding_window", None)
    layers = getattr(model.config, "layer_types", None) or ["sliding_attention"]
    if window is not None and window < facts.max_tokens and "sliding_attention" in layers:
        raise UnsupportedModel(
            f"layers of `{facts.architecture}` look back {window} tokens only, torch programs see "
            "all of a row",
            hint="its ONNX graphs are not affected",
        )


def _attention(asked: Attention) -> str:
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTIONS["sdpa"], _attend)
    return _ATTENTIONS[asked]


def _attend(
    _module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries [B, Q, T, size] to memory [B, heads, M, size], gives [B, T, Q, size].

    Queries that share a head of the memory are read as so many tokens of it, because torch would
    first copy the memory for each of them.
    """
    import torch

    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if how.get(name)]:
        raise NotImplementedError(f"attention with `{unknown[0]}`")
    rows, queries, tokens, size = query.shape
    heads = key.shape[1]
    found = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads, queries // heads * tokens, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, queries // heads, 1),
        scale=how.get("scaling"),
    )
    return found.reshape(rows, queries, tokens, size).transpose(1, 2), None


def _traced(
    model: TorchModel, facts: ModelFacts, attention: Attention
) -> torch.export.ExportedProgram:
    import torch

    model.set_attn_implementation(_attention(attention))
    decoding = facts.generating
    shape = (_ROWS, decoding.kv_heads, _ROOM, decoding.head_dim)
    memory = [torch.zeros(shape, dtype=model.dtype) for _ in range(2 * decoding.layers)]
    example = {
        "input_ids": torch.ones(_ROWS, _TOKENS, dtype=torch.int64),
        "lengths": torch.zeros(_ROWS, dtype=torch.int64),
        "wanted": torch.arange(_WANTED),
        "memory": memory,
    }
    rows = torch.export.Dim("rows", min=1, max=_MOST_ROWS)
    tokens, wanted, room = (
        torch.export.Dim(name, min=1, max=facts.max_tokens) for name in ("tokens", "wanted", "room")
    )
    shapes = {
        "input_ids": {0: rows, 1: tokens},
        "lengths": {0: rows},
        "wanted": {0: wanted},
        "memory": [{0: rows, 2: room} for _ in memory],
    }
    return torch.export.export(
        _module(model),
        (),
        example,
        dynamic_shapes=shapes,
        # Sizes at which a tensor happens to lie differently are no reason to refuse others.
        prefer_deferred_runtime_asserts_over_guards=True,
    )


def _module(model: TorchModel) -> torch.nn.Module:
    """What is traced: `model`, reading from and writing to memory that it is given."""
    import torch

    class Program(torch.nn.Module):  # type: ignore[misc]  # torch is not typed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self,
            input_ids: torch.Tensor,
            lengths: torch.Tensor,
            wanted: torch.Tensor,
            memory: Sequence[torch.Tensor],
        ) -> torch.Tensor:
            places = lengths[:, None] + torch.arange(input_ids.shape[1], device=lengths.device)
            room = torch.arange(memory[0].shape[2], device=lengths.device)
            hidden = room > places[:, None, :, None]  # [B, 1, T, room]
            answer = self.model(
                input_ids=input_ids,
                position_ids=places,
                attention_mask=hidden.to(memory[0].dtype).masked_fill(hidden, float("-inf")),
                past_key_values=_cache(memory, places),
                use_cache=True,
                logits_to_keep=wanted,
            )
            return answer.logits.float()

    return Program()


def _cache(memory: Sequence[torch.Tensor], places: torch.Tensor) -> Any:
    """The memory as transformers' models use it; tokens [B, T] belong at `places` [B, T]."""
    from transformers import Cache

    def written(kept: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        # What is masked is multiplied by zero, which NaN outlasts: whoever has the row next would
        # get it too.
        finite = fresh.nan_to_num(0.0, 0.0, 0.0)
        return kept.scatter_(2, places[:, None, :, None].expand(fresh.shape), finite)

    class Rows(Cache):  # type: ignore[misc]  # transformers is not typed
        def update(
            self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            kept_keys, kept_values = memory[2 * layer : 2 * layer + 2]
            return written(kept_keys, keys), written(kept_values, values)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0  # each row has its own

    return Rows(layers=[])
