"""From a body of the Hugging Face routes to what is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.errors import InvalidField, MalformedBody, UnknownParameter
from deployments.tasks import TASKS, list_task_names

# Top-level keys every body may have. `stream` is sent by clients out of habit.
ENVELOPE_KEYS = frozenset({"inputs", "parameters", "options", "stream", "model"})
# Clients before 0.30, and those of text-embeddings-inference, send these in place of `inputs`.
LEGACY_INPUT_KEYS = ("source_sentence", "sentences", "question", "context", "query", "texts")
# Parameters newer clients write at the top level.
TASK_PARAMETER_KEYS = frozenset().union(*(task.parameters.model_fields for task in TASKS.values()))


def parse_task(name: str | None) -> str | None:
    """The task named in the path. Raises InvalidField."""
    if name is None:
        return None
    names = list_task_names()
    if name not in names:
        known = ", ".join(f"`{task}`" for task in names)
        raise InvalidField(f"`{name}` is not a task; known: {known}", field="task")
    return name


def parse_envelope(body: Any) -> Mapping[str, Any]:
    """The body as an object: a bare text or list, as very old clients send it, is `inputs`.

    Raises MalformedBody.
    """
    if isinstance(body, str | list):
        return {"inputs": body}
    if not isinstance(body, dict):
        raise MalformedBody("the body must be a JSON object, a text or a list", field="body")
    return body


def parse_task_inputs(body: Mapping[str, Any]) -> Any:
    """`inputs`, or the task keys other clients put in its place. Raises InvalidField."""
    inputs = body.get("inputs")
    if inputs is not None:
        return inputs
    lifted = {key: body[key] for key in LEGACY_INPUT_KEYS if key in body}
    if not lifted:
        raise InvalidField("Error in `inputs`: field required", field="inputs")
    return lifted


def parse_task_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """`parameters`, with those that newer clients write at the top level.

    Raises InvalidField, or UnknownParameter for a top-level key no task knows.
    """
    given = merge_parameters(
        {key: value for key, value in body.items() if key not in LEGACY_INPUT_KEYS}
    )
    for key in body:
        if (
            key not in TASK_PARAMETER_KEYS
            and key not in ENVELOPE_KEYS
            and key not in LEGACY_INPUT_KEYS
        ):
            raise UnknownParameter(f"`{key}` is not known here", field=key)
    return given


def merge_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """`parameters`, and all that stands beside it. Raises InvalidField."""
    nested = body.get("parameters")
    if nested is not None and not isinstance(nested, dict):
        raise InvalidField("`parameters` must be an object", field="parameters")
    loose = {key: value for key, value in body.items() if key not in ENVELOPE_KEYS}
    return {**loose, **(nested or {})}


def parse_stream_flag(body: Mapping[str, Any]) -> bool:
    """Whether events are to be answered. Raises InvalidField."""
    streams = body.get("stream")
    if streams is not None and not isinstance(streams, bool):
        raise InvalidField("`stream` must be a boolean", field="stream")
    return bool(streams)
