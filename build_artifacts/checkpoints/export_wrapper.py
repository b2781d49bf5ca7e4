"""Wrapper of a torch model whose forward returns one tensor, for export and reference runs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.checkpoints.projection import build_projection
from build_artifacts.checkpoints.rerankers import LogitScore
from build_artifacts.checkpoints.sentences import Pooling
from build_artifacts.checkpoints.splade import SpladePooling
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.types import ModelHead
from deployments.engines.graph_io import MASK_POSITIONS

# (model output, mask [B, T]) -> return value of the wrapped forward
OutputFunction = Callable[[Any, Any], Any]


def wrap_for_export(
    model: TorchModel, metadata: CheckpointMetadata, *, with_tokens: bool = False
) -> TorchModel:
    """Return a copy of `model`, with the same weights, whose forward returns one float32 tensor.

    The inputs are B texts of T tokens with M masks; `input_names` lists them. With W values per
    row, VECTOR, LABELS and SPARSE return [B, W], TOKENS [B, T, W], SPAN [B, T, 2] and MASKS [M, W].
    Vectors are pooled and projected but not normalized, because the server normalizes them. SPARSE
    returns the pooled weights of the vocabulary, the other heads logits. With `with_tokens`, a
    VECTOR model returns a pair: the pooled vectors [B, W], and the token vectors [B, T, hidden
    size] in the model's dtype.
    """
    rows = copy.copy(model)
    if metadata.logit_score is not None:
        rows._modules = _keep_logits(model, metadata.logit_score)
        rows.__class__ = _export_class(type(model), _score_answer)
        return rows
    if _classifies_last_token(model):
        rows.__class__ = _last_token_class(type(model))
        return rows
    answer = _OUTPUT_FUNCTIONS.get(metadata.head)
    if metadata.splade is not None:
        answer = _weigh_vocabulary(metadata.splade)
    elif answer is None:
        answer = _POOLED[metadata.pooling]
        if metadata.projection:
            projection = build_projection(metadata.projection)
            # The copy shares the module table of `model`. Replace the table, so that `model` does
            # not get the projection.
            rows._modules = {**model._modules, "sentence_projection": projection}
            answer = _project(answer, projection)
        if with_tokens:
            answer = _with_token_outputs(answer)
    rows.__class__ = _export_class(type(model), answer)
    return rows


def input_names(model: TorchModel, metadata: CheckpointMetadata) -> tuple[str, ...]:
    """Return the names of the inputs, int64 [B, T].

    The head MASKS adds `mask_positions`, [M]: flat indices into B * T of the tokens to predict.
    """
    names = ["input_ids", "attention_mask"]
    if metadata.has_token_types and _reads_token_types(model):
        names.append("token_type_ids")
    if metadata.head is ModelHead.MASKS:
        names.append(MASK_POSITIONS)
    return tuple(names)


def _keep_logits(model: TorchModel, score: LogitScore) -> dict[str, Any]:
    """Return the modules of a decoder, with an output layer for the tokens of `score` only."""
    import torch

    head = model.get_output_embeddings()
    tokens = list(score.tokens)
    if max(tokens) >= len(head.weight):
        raise UnsupportedModel(
            f"the score reads the logit of token {max(tokens)}; the model has {len(head.weight)}",
            hint="correct the token ids of the module LogitScore",
        )
    if all(part is not head for part in model._modules.values()):
        raise UnsupportedModel(
            f"the output layer of `{type(model).__name__}` is part of another layer, which is not "
            "supported for ranking",
            hint="use a decoder whose logits are those of one layer, such as Qwen3",
        )
    kept = torch.nn.Linear(head.in_features, len(tokens), bias=head.bias is not None)
    kept.weight = torch.nn.Parameter(head.weight[tokens].detach())
    if head.bias is not None:
        kept.bias = torch.nn.Parameter(head.bias[tokens].detach())
    return {name: kept if part is head else part for name, part in model._modules.items()}


def _score_answer(out: Any, mask: Any) -> Any:
    logits = _take(out.logits, mask.sum(1) - 1).float()
    return logits[:, :1] - logits[:, 1:] if logits.shape[-1] == 2 else logits


def _classifies_last_token(model: TorchModel) -> bool:
    from transformers.modeling_layers import GenericForSequenceClassification

    return isinstance(model, GenericForSequenceClassification)


def _last_token_class(base: type) -> type:
    """Create a subclass of the decoder `base` whose forward classifies the last token of each text.

    As in transformers, tokens with the id of the padding do not count, even if the mask has them.
    The forward of `base` refuses batches if the config states no such id, and applies its head to
    all tokens.
    """
    import torch

    def forward(self: Any, input_ids: Any, attention_mask: Any) -> Any:
        padding = self.config.get_text_config().pad_token_id
        counts = attention_mask if padding is None else attention_mask * (input_ids != padding)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        out = self.base_model(input_ids=input_ids, attention_mask=attention_mask)
        return self.score(_take(out.last_hidden_state, (positions * counts).amax(1))).float()

    return type(base.__name__, (base,), {"forward": forward})


def _reads_token_types(model: TorchModel) -> bool:
    """Return whether token types affect the output."""
    is_input = "token_type_ids" in inspect.signature(type(model).forward).parameters
    return is_input and getattr(model.config, "type_vocab_size", 0) > 1


def _export_class(base: type, answer: OutputFunction) -> type:
    """Create a subclass of `base` whose forward applies `answer` to the model output.

    The subclass has the name of `base`, because exporters identify models by class name.
    """
    inner: Any = base

    def forward(
        self: Any,
        input_ids: Any,
        attention_mask: Any,
        token_type_ids: Any = None,
        mask_positions: Any = None,
    ) -> Any:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        with _select_positions(self.base_model, mask_positions):
            out = inner.forward(self, **inputs)
        return answer(out, attention_mask)

    return type(base.__name__, (base,), {"forward": forward})


@contextmanager
def _select_positions(encoder: TorchModel, positions: Any) -> Iterator[None]:
    """Make `encoder` return only the vectors at `positions`, as one text of M tokens.

    The vocabulary projection, the widest MatMul of the model, then runs for mask tokens only. With
    `positions` None, `encoder` returns all vectors.
    """
    if positions is None:
        yield
        return

    def select(_module: Any, _inputs: Any, out: Any) -> Any:
        hidden = out.last_hidden_state
        out.last_hidden_state = hidden.reshape(-1, hidden.shape[-1])[positions][None]
        return out

    hook = encoder.register_forward_hook(select)
    try:
        yield
    finally:
        hook.remove()


def _project(pool: OutputFunction, projection: Any) -> OutputFunction:
    return lambda out, mask: projection(pool(out, mask))


def _with_token_outputs(pool: OutputFunction) -> OutputFunction:
    def both(out: Any, mask: Any) -> Any:
        # The token vectors keep the model's dtype. A conversion would take time in every forward
        # pass, even if the caller reads only the pooled vectors.
        return pool(out, mask), out.last_hidden_state

    return both


def _mean(out: Any, mask: Any) -> Any:
    weights = mask.unsqueeze(-1).float()
    return _sum(out, weights) / weights.sum(1).clamp(min=1e-9)


def _mean_by_root_of_length(out: Any, mask: Any) -> Any:
    weights = mask.unsqueeze(-1).float()
    return _sum(out, weights) / weights.sum(1).clamp(min=1e-9).sqrt()


def _mean_by_position(out: Any, mask: Any) -> Any:
    """Average the tokens with their positions, from 1, as weights."""
    return _mean(out, mask * mask.cumsum(1))


def _sum(out: Any, weights: Any) -> Any:
    # In float32: a sum of 512 half-precision values loses digits.
    return (out.last_hidden_state.float() * weights).sum(1)


def _largest(out: Any, mask: Any) -> Any:
    return out.last_hidden_state.float().masked_fill(mask.unsqueeze(-1) == 0, -1e9).amax(1)


def _first(out: Any, _mask: Any) -> Any:
    return out.last_hidden_state[:, 0].float()


def _last(out: Any, mask: Any) -> Any:
    return _take(out.last_hidden_state, mask.sum(1) - 1).float()


def _take(hidden: Any, positions: Any) -> Any:
    """Return the vector at one position of each text: [B, T, W] and [B] become [B, W]."""
    return hidden.gather(1, positions[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]


def _logits(out: Any, _mask: Any) -> Any:
    return out.logits.float()


def _span(out: Any, _mask: Any) -> Any:
    import torch

    return torch.stack([out.start_logits, out.end_logits], dim=-1).float()


def _selected(out: Any, _mask: Any) -> Any:
    return out.logits[0].float()


def _weigh_vocabulary(pooling: SpladePooling) -> OutputFunction:
    def activate(scores: Any) -> Any:
        weights = scores.relu().log1p()
        return weights.log1p() if pooling.activation == "log1p_relu" else weights

    def take_largest(out: Any, mask: Any) -> Any:
        # The activation does not change which score is the largest. Padding scores 0, the least
        # that the activation returns.
        return activate((out.logits * mask.unsqueeze(-1)).amax(1).float())

    def add(out: Any, mask: Any) -> Any:
        return (activate(out.logits.float()) * mask.unsqueeze(-1)).sum(1)

    return take_largest if pooling.strategy == "max" else add


_POOLED: dict[Pooling | None, OutputFunction] = {
    "mean": _mean,
    "cls": _first,
    "last": _last,
    "max": _largest,
    "mean_sqrt_len": _mean_by_root_of_length,
    "weighted_mean": _mean_by_position,
}
_OUTPUT_FUNCTIONS: dict[ModelHead, OutputFunction] = {
    ModelHead.LABELS: _logits,
    ModelHead.TOKENS: _logits,
    ModelHead.SPAN: _span,
    ModelHead.MASKS: _selected,
}
