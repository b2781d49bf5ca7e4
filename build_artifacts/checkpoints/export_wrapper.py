"""A torch model made to answer what its head says, the same way for export and for verification."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.checkpoints.sentences import Pooling
from deployments.artifacts.types import ModelHead
from deployments.engines.graph_io import MASK_POSITIONS

# (the model's output, mask [B, T]) -> what the forward of `wrap_for_export` returns
OutputFunction = Callable[[Any, Any], Any]


def wrap_for_export(
    model: TorchModel, head: ModelHead, pooling: Pooling | None = None, *, with_tokens: bool = False
) -> TorchModel:
    """`model`, its weights shared, with a forward that returns one float32 tensor and nothing else.

    VECTOR and LABELS give [B, W], TOKENS [B, T, W], SPAN [B, T, 2] and MASKS [M, W]. Vectors are
    pooled and not normalised (the server normalises); the other heads give logits. The inputs are
    those of `input_names`. A model of vectors returns, `with_tokens`, what it pools as well: a pair
    of [B, W] and [B, T, W], the latter in the model's own type.
    """
    answer = _POOLED[pooling] if head is ModelHead.VECTOR else _OUTPUT_FUNCTIONS[head]
    if with_tokens and head is ModelHead.VECTOR:
        answer = _with_token_outputs(answer)
    rows = copy.copy(model)
    rows.__class__ = _export_class(type(model), answer)
    return rows


def input_names(model: TorchModel, head: ModelHead) -> tuple[str, ...]:
    """What the model's rows are computed from, int64 [B, T].

    But for `mask_positions` of the head MASKS: [M], the flat indices into B * T of the tokens to
    answer for.
    """
    names = ["input_ids", "attention_mask"]
    if _has_token_types(model):
        names.append("token_type_ids")
    if head is ModelHead.MASKS:
        names.append(MASK_POSITIONS)
    return tuple(names)


def _has_token_types(model: TorchModel) -> bool:
    """Whether the segment of a token changes the answer."""
    asked = "token_type_ids" in inspect.signature(type(model).forward).parameters
    return asked and getattr(model.config, "type_vocab_size", 0) > 1


def _export_class(base: type, answer: OutputFunction) -> type:
    """A subclass of `base`: the exporter knows architectures by their classes, not by wrappers."""
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
    """Meanwhile `encoder` hands on the vectors at `positions` only, as one text of M tokens.

    So that the product with the vocabulary, wider than the rest of the model, is computed for
    the mask tokens and for nothing else. Everything is handed on while `positions` is None.
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


def _with_token_outputs(pool: OutputFunction) -> OutputFunction:
    def both(out: Any, mask: Any) -> Any:
        # As it is: a conversion would be a pass over all of it, whether somebody asks or not.
        return pool(out, mask), out.last_hidden_state

    return both


def _mean(out: Any, mask: Any) -> Any:
    # In float32 whatever the model's type: a sum over 512 half-precision values loses digits.
    weight = mask.unsqueeze(-1).float()
    return (out.last_hidden_state.float() * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


def _first(out: Any, _mask: Any) -> Any:
    return out.last_hidden_state[:, 0].float()


def _last(out: Any, mask: Any) -> Any:
    hidden = out.last_hidden_state
    last = (mask.sum(1) - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
    return hidden.gather(1, last)[:, 0].float()


def _logits(out: Any, _mask: Any) -> Any:
    return out.logits.float()


def _span(out: Any, _mask: Any) -> Any:
    import torch

    return torch.stack([out.start_logits, out.end_logits], dim=-1).float()


def _selected(out: Any, _mask: Any) -> Any:
    return out.logits[0].float()


_POOLED: dict[Pooling | None, OutputFunction] = {"mean": _mean, "cls": _first, "last": _last}
_OUTPUT_FUNCTIONS: dict[ModelHead, OutputFunction] = {
    ModelHead.LABELS: _logits,
    ModelHead.TOKENS: _logits,
    ModelHead.SPAN: _span,
    ModelHead.MASKS: _selected,
}
