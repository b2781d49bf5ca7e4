"""From a body of the Hugging Face routes to what is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.artifacts.manifest import GENERATING_TASKS, TaskName
from deployments.errors import InvalidField, MalformedBody, UnknownParameter
from deployments.tasks import TASKS

# Top-level keys every body may have. `stream` is sent by clients out of habit.
ENVELOPE = frozenset({"inputs", "parameters", "options", "stream", "model"})
# Clients before 0.30, and those of text-embeddings-inference, send these in place of `inputs`.
LIFTED = ("source_sentence", "sentences", "question", "context", "query", "texts")
# Parameters newer clients write at the top level.
PARAMETERS = frozenset().union(*(task.parameters.model_fields for task in TASKS.values()))


def task_of(name: str | None) -> TaskName | None:
    """The task named in the path. Raises InvalidField."""
    if name is None:
        return None
    try:
        return TaskName(name)
    except ValueError as exc:
        known = ", ".join(f"`{task}`" for task in (*TASKS, *GENERATING_TASKS))
        raise InvalidField(f"`{name}` is not a task; known: {known}", field="task") from exc


def envelope_of(body: Any) -> Mapping[str, Any]:
    """The body as an object: a bare text or list, as very old clients send it, is `inputs`.

    Raises MalformedBody.
    """
    if isinstance(body, str | list):
        return {"inputs": body}
    if not isinstance(body, dict):
        raise MalformedBody("the body must be a JSON object, a text or a list", field="body")
    return body


def inputs_of(body: Mapping[str, Any]) -> Any:
    """`inputs`, or the task keys other clients put in its place. Raises InvalidField."""
    inputs = body.get("inputs")
    if inputs is not None:
        return inputs
    lifted = {key: body[key] for key in LIFTED if key in body}
    if not lifted:
        raise InvalidField("Error in `inputs`: field required", field="inputs")
    return lifted


def parameters_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """`parameters`, with those that newer clients write at the top level.

    Raises InvalidField, or UnknownParameter for a top-level key no task knows.
    """
    given = given_parameters({key: value for key, value in body.items() if key not in LIFTED})
    for key in body:
        if key not in PARAMETERS and key not in ENVELOPE and key not in LIFTED:
            raise UnknownParameter(f"`{key}` is not known here", field=key)
    return given


def given_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """`parameters`, and all that stands beside it. Raises InvalidField."""
    nested = body.get("parameters")
    if nested is not None and not isinstance(nested, dict):
        raise InvalidField("`parameters` must be an object", field="parameters")
    loose = {key: value for key, value in body.items() if key not in ENVELOPE}
    return {**loose, **(nested or {})}


def wants_stream(body: Mapping[str, Any]) -> bool:
    """Whether events are to be answered. Raises InvalidField."""
    streams = body.get("stream")
    if streams is not None and not isinstance(streams, bool):
        raise InvalidField("`stream` must be a boolean", field="stream")
    return bool(streams)
