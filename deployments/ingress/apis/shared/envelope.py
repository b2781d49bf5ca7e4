"""Parsing of envelopes: bodies with `inputs`, `parameters`, `options`, `stream` and `model`.

The Hugging Face routes have such bodies, and so does text-generation-inference's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployments.errors import InvalidField, MalformedBody, UnknownParameter
from deployments.tasks import TASKS, list_task_names

# Top-level keys that a body of any task may have. Some clients send `stream` for every task.
ENVELOPE_KEYS = frozenset({"inputs", "parameters", "options", "stream", "model"})
# Keys that huggingface_hub before 0.30 and clients of text-embeddings-inference send in place of
# `inputs`.
LEGACY_INPUT_KEYS = ("source_sentence", "sentences", "question", "context", "query", "texts")
# Names of the parameters of all tasks. Newer clients send parameters at the top level.
TASK_PARAMETER_KEYS = frozenset().union(*(task.parameters.model_fields for task in TASKS.values()))
TOP_LEVEL_KEYS = TASK_PARAMETER_KEYS.union(ENVELOPE_KEYS, LEGACY_INPUT_KEYS)


def parse_task(name: str | None) -> str | None:
    """Check the task name of a path and return it; None if the path has none.

    Raises InvalidField for an unknown task.
    """
    if name is None:
        return None
    names = list_task_names()
    if name not in names:
        known = ", ".join(f"`{task}`" for task in names)
        raise InvalidField(f"`{name}` is not a task. Known tasks: {known}", field="task")
    return name


def parse_envelope(body: Any) -> Mapping[str, Any]:
    """Return the body as an object. Raises MalformedBody for a number, a boolean or null.

    A text or a list, which very old clients send, becomes `inputs`.
    """
    if isinstance(body, str | list):
        return {"inputs": body}
    if not isinstance(body, dict):
        raise MalformedBody("the body must be a JSON object, a text or a list", field="body")
    return body


def find_task_inputs(body: Mapping[str, Any]) -> Any:
    """Return `inputs`. Without `inputs`, return the legacy keys of the body, {} if it has none."""
    inputs = body.get("inputs")
    if inputs is not None:
        return inputs
    return {key: body[key] for key in LEGACY_INPUT_KEYS if key in body}


def parse_task_inputs(body: Mapping[str, Any]) -> Any:
    """Return `find_task_inputs(body)`. Raises InvalidField if the body has no inputs."""
    inputs = find_task_inputs(body)
    if inputs == {} and body.get("inputs") is None:
        raise InvalidField("Error in `inputs`: field required", field="inputs")
    return inputs


def merge_task_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Merge parameters as `merge_parameters` does, without the legacy keys of the inputs."""
    return merge_parameters({k: v for k, v in body.items() if k not in LEGACY_INPUT_KEYS})


def check_task_keys(body: Mapping[str, Any]) -> None:
    """Raise UnknownParameter for a top-level key that no encoder task has."""
    if unknown := next((key for key in body if key not in TOP_LEVEL_KEYS), None):
        raise UnknownParameter(f"`{unknown}` is not a parameter of any task", field=unknown)


def merge_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `parameters` and the top-level keys outside ENVELOPE_KEYS.

    A value in `parameters` overrides the value at the top level. A null does not, because it means
    "not set". Raises InvalidField if `parameters` is not an object.
    """
    nested = body.get("parameters")
    if nested is not None and not isinstance(nested, dict):
        raise InvalidField("`parameters` must be an object", field="parameters")
    top_level = {key: value for key, value in body.items() if key not in ENVELOPE_KEYS}
    for key, value in (nested or {}).items():
        if value is not None or key not in top_level:
            top_level[key] = value
    return top_level


def parse_stream_flag(body: Mapping[str, Any]) -> bool:
    """Return whether the body requests a stream.

    Raises InvalidField if `stream` is neither a boolean nor null.
    """
    streams = body.get("stream")
    if streams is not None and not isinstance(streams, bool):
        raise InvalidField("`stream` must be a boolean", field="stream")
    return bool(streams)
