"""A torch model made to answer one row per text, the same way for export and for verification."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from build_artifacts.facts import Pooling
from build_artifacts.models import TorchModel

Answer = Callable[[Any, Any], Any]  # (the model's output, mask [B, T]) -> [B, W] float32


def row_model(model: TorchModel, pooling: Pooling | None) -> TorchModel:
    """`model` with a forward that returns [B, W] float32 rows and nothing else, in place.

    Embeddings are pooled and not normalised (the server normalises); without `pooling` the rows
    are a classifier's logits.
    """
    token_types = reads_token_types(model)
    model.__class__ = _row_class(type(model), _ROWS[pooling], token_types=token_types)
    return model


def reads_token_types(model: TorchModel) -> bool:
    """Whether the segment of a token changes the answer."""
    asked = "token_type_ids" in inspect.signature(type(model).forward).parameters
    return asked and getattr(model.config, "type_vocab_size", 0) > 1


def _row_class(base: type, answer: Answer, *, token_types: bool) -> type:
    """A subclass of `base`: the exporter knows architectures by their classes, not by wrappers."""
    inner: Any = base

    def typed(self: Any, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
        out = inner.forward(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
        )
        return answer(out, attention_mask)

    def plain(self: Any, input_ids: Any, attention_mask: Any) -> Any:
        out = inner.forward(self, input_ids=input_ids, attention_mask=attention_mask)
        return answer(out, attention_mask)

    return type(base.__name__, (base,), {"forward": typed if token_types else plain})


def _mean_rows(out: Any, mask: Any) -> Any:
    # In float32 whatever the model's type: a sum over 512 half-precision values loses digits.
    weight = mask.unsqueeze(-1).float()
    return (out.last_hidden_state.float() * weight).sum(1) / weight.sum(1).clamp(min=1e-9)


def _cls_rows(out: Any, _mask: Any) -> Any:
    return out.last_hidden_state[:, 0].float()


def _logit_rows(out: Any, _mask: Any) -> Any:
    return out.logits.float()


_ROWS: dict[Pooling | None, Answer] = {"mean": _mean_rows, "cls": _cls_rows, None: _logit_rows}
