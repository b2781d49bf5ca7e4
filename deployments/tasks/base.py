"""The Task protocol, which parses request bodies to texts and decodes model outputs to responses.

Tasks import neither HTTP nor engine code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
)

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, field_validator

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TruncationSide
from deployments.messages import Text, TokenizedItem, TokenOffsets, Truncation, Windowing
from deployments.tasks.inputs import ANY_CASE, Inputs

if TYPE_CHECKING:  # keeps the tokenizers library out of the ingress
    from deployments.tokenization.vocabulary import TokenVocabulary

T = TypeVar("T")

# Seconds of `decode` per output value, most of them in NumPy.
_VALUE_S = 1e-8


@dataclass(frozen=True, slots=True)
class TaskInput:
    """A parsed request body: the texts and the options of `decode`."""

    texts: tuple[Text, ...]
    fields: tuple[str, ...]
    options: Any
    truncation: Truncation
    windowing: Windowing | None = None  # for tasks whose results are character ranges
    many: str = "inputs"  # request path for the error about too many items
    # Path of a list whose items are paired with each item of `many`: each pair is a text.
    paired_with: str | None = None
    # Paths of the parts that all pairs share, by index; None: `fields` names the part.
    part_fields: tuple[str | None, ...] = ()
    extra: int = 0  # texts outside of `many`, such as a sentence that is compared with all items


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """Outputs of one call, and the inputs that `decode` needs."""

    rows: Sequence[NDArray[np.float32]]  # one array per item, shaped as `manifest.head` states
    items: Sequence[TokenizedItem]
    token_offsets: Sequence[TokenOffsets]  # one per item if the call has a windowing, else empty
    manifest: ArtifactManifest
    vocabulary: TokenVocabulary | None = None  # set if the task `needs_vocabulary`

    def require_vocabulary(self) -> TokenVocabulary:
        if self.vocabulary is None:
            raise AssertionError("bug: the task does not declare `needs_vocabulary`")
        return self.vocabulary


class Task(Protocol):
    """One task of encoder models. Stateless; one instance in TASKS.

    To add a task, write a file with a subclass and add a line to TASKS. Routes, documentation and
    tensors of the Open Inference Protocol follow from the attributes of the subclass.
    """

    name: ClassVar[str]
    head: ClassVar[ModelHead]  # the head of models made for this task
    inputs: ClassVar[Inputs[Any]]
    parameters: ClassVar[type[TextParameters]]
    options_type: ClassVar[Any] = None  # NamedTuple of plain values, sent between processes
    response_type: ClassVar[Any]  # JSON type of `decode`'s result, for the documentation
    example: ClassVar[Mapping[str, Any]]  # a request body, for the documentation
    needs_vocabulary: ClassVar[bool] = False  # `decode` reads `DecodeContext.vocabulary`
    unpooled: ClassVar[bool] = False  # one row per token, [T, W], even if the model pools
    reads_pairs: ClassVar[bool] = False  # the model was trained on pairs of texts

    def fits(self, manifest: ArtifactManifest) -> bool:
        """Return whether a model with this manifest can do the task."""
        return manifest.head is self.head

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        """Return whether a body without a task name can only be meant for this task."""
        return False

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """Parse a request body.

        If it is invalid, raises InvalidField, EmptyInput or UnknownParameter with the field's path.
        """
        ...

    def decode(self, context: DecodeContext, options: Any) -> Any:
        """Convert the outputs of one call to the value that Hugging Face clients expect.

        Runs in the encoder replica, so that only small results are sent to the ingress. The
        forward pass runs also for a task that does not read `context.rows`. Raises ServeError for
        errors that show only after tokenization, such as a text without a mask.
        """
        ...

    def predict_decode_s(self, context: DecodeContext, options: Any) -> float:
        """Predict the seconds of `decode`. A long `decode` runs in a thread, not the event loop."""
        return _VALUE_S * sum(row.size for row in context.rows)


class TextParameters(BaseModel):
    """Parameters of every task. null means "not given", because old clients send null."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    truncate: bool | None = None
    truncation_direction: Annotated[TruncationSide | None, ANY_CASE] = None

    def choose_truncation(self, manifest: ArtifactManifest) -> Truncation:
        """Return how to shorten a long text. `truncation_direction` is the side that is removed."""
        if not self.truncate:
            return Truncation.REFUSE
        return Truncation.remove(self.truncation_direction or manifest.truncation_side)


class TruncatingParameters(TextParameters):
    """Parameters of a task that truncates long texts unless `truncate` is false."""

    truncate: bool | None = True

    @field_validator("truncate", mode="before")
    @classmethod
    def _null_is_not_given(cls, value: Any) -> Any:
        return True if value is None else value


class OneOrMany(NamedTuple, Generic[T]):
    """Items that were sent alone or in a list."""

    items: tuple[T, ...]
    fields: tuple[str, ...]  # field of each item in the body, such as `inputs[0]`
    single: bool


def as_list(value: T | list[T]) -> OneOrMany[T]:
    single = not isinstance(value, list)
    items = tuple(value) if isinstance(value, list) else (value,)
    return OneOrMany(items, build_item_paths("inputs", len(items), single=single), single)


def build_item_paths(path: str, count: int, *, single: bool) -> tuple[str, ...]:
    return (path,) if single else tuple(f"{path}[{i}]" for i in range(count))
