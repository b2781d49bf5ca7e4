"""What a task is: body to texts, numbers to an answer. Knows no HTTP and no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
)

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead
from deployments.messages import Text, TokenizedItem, TokenOffsets, Truncation, Windowing
from deployments.tasks.inputs import ANY_CASE, Inputs

if TYPE_CHECKING:  # the ingress, which parses, has no use for a tokenizer
    from deployments.tokenization.vocabulary import TokenVocabulary

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskInput:
    """A parsed request body: the items, and how the task will decode them."""

    texts: tuple[Text, ...]
    fields: tuple[str, ...]
    options: Any
    truncation: Truncation
    windowing: Windowing | None = None  # for tasks that answer in characters
    many: str = "inputs"  # the request path of what there may be too many of


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """All that an encoder knows of a call when its numbers are there."""

    rows: Sequence[NDArray[np.float32]]  # one array per item, of the shape `manifest.head` says
    items: Sequence[TokenizedItem]
    token_offsets: Sequence[
        TokenOffsets
    ]  # one per item where the call has a `windowing`, else empty
    manifest: ArtifactManifest
    vocabulary: TokenVocabulary | None = None  # where the task `needs_vocabulary`

    @property
    def words(self) -> TokenVocabulary:
        """The vocabulary, for a task that `needs_vocabulary`."""
        if self.vocabulary is None:
            raise AssertionError("this is a bug: tokens to be named, and no vocabulary")
        return self.vocabulary


class Task(Protocol):
    """One task of encoder models. Stateless; one instance in TASKS.

    A file with a subclass and a line in TASKS add a task. Routes, documentation and tensors of the
    Open Inference Protocol follow from the attributes.
    """

    name: ClassVar[str]
    head: ClassVar[ModelHead]  # the head of models made for this task
    inputs: ClassVar[Inputs[Any]]
    parameters: ClassVar[type[TextParameters]]
    response_type: ClassVar[Any]  # JSON type of `decode`'s result, for the documentation
    example: ClassVar[Mapping[str, Any]]  # a request body, for the documentation
    needs_vocabulary: ClassVar[bool] = False  # `decode` reads `DecodeContext.vocabulary`
    unpooled: ClassVar[bool] = False  # rows are [T, W] even if the model pools
    reads_pairs: ClassVar[bool] = False  # the model was trained on pairs of texts

    def fits(self, manifest: ArtifactManifest) -> bool:
        """Whether a model with this manifest can do the task."""
        return manifest.head is self.head

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        """Whether a body without a task name can only be meant for this task."""
        return False

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """Raises InvalidField, EmptyInput or UnknownParameter with the path of the field."""
        ...

    def decode(self, context: DecodeContext, options: Any) -> Any:
        """Convert the outputs of one call to the value that Hugging Face clients expect.

        Runs in the encoder replica, so that only small results are sent to the ingress. Raises
        ServeError for errors that only tokens reveal, such as a text without a mask.
        """
        ...


class TextParameters(BaseModel):
    """Parameters every text task has. null means "not given", as old clients send it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    truncate: bool | None = None
    truncation_direction: Annotated[Literal["left", "right"] | None, ANY_CASE] = None

    @property
    def truncation(self) -> Truncation:
        """`truncation_direction` names the side that is cut off."""
        if not self.truncate:
            return Truncation.REFUSE
        left = self.truncation_direction == "left"
        return Truncation.KEEP_END if left else Truncation.KEEP_START


class OneOrMany(NamedTuple, Generic[T]):
    """What came alone or in a list."""

    items: tuple[T, ...]
    fields: tuple[str, ...]  # the request path of each
    single: bool


def as_list(given: T | list[T]) -> OneOrMany[T]:
    """`inputs` that are one item or a list of them."""
    single = not isinstance(given, list)
    items = tuple(given) if isinstance(given, list) else (given,)
    return OneOrMany(items, build_item_paths("inputs", len(items), single=single), single)


def build_item_paths(path: str, count: int, *, single: bool) -> tuple[str, ...]:
    """The request paths of `count` items under `path`."""
    return (path,) if single else tuple(f"{path}[{i}]" for i in range(count))
