"""Every change of what travels over a channel raises the version of its format."""

from __future__ import annotations

import hashlib
import struct
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from deployments.messages import PRIORITIES
from deployments.tasks import TASKS
from deployments.transports.channel import codec, endpoint, frames
from deployments.transports.channel.frames import WIRE_VERSION
from tests.support import released

# The version, and the fingerprint of its format.
PINNED = (10, "2707e85db37ef4d4")


def test_a_change_of_the_format_raises_its_version() -> None:
    fingerprint = hashlib.sha256(describe_format().encode()).hexdigest()[:16]
    version = max(WIRE_VERSION, released.WIRE_VERSION + 1)
    assert (WIRE_VERSION, fingerprint) == PINNED, (
        "a message, an option or a frame changed, so replicas of the last release cannot read it. "
        f"Set `WIRE_VERSION` in deployments/transports/channel/frames.py to {version} and `PINNED` "
        f'of this test to ({version}, "{fingerprint}")'
    )


def test_the_fingerprint_covers_the_messages() -> None:
    described = describe_format()
    for part in ("trim_special: bool", "raw_bytes: bytes | None", "END = 'end'", "num_beams: int"):
        assert part in described
    assert "top_k" in described, "options of the tasks"


def describe_format() -> str:
    """Describe all that travels: field names, types, enum values and the layouts of frames.

    A task without options is left out: replicas that do not know it refuse its calls by name, and
    the calls are sent to other replicas. Errors travel as a name and attributes, so that their
    classes may differ between versions.
    """
    kinds = msgspec.msgpack.Decoder, msgspec.json.Decoder
    decoders = [each for each in vars(codec).values() if isinstance(each, kinds)]
    lines = [
        f"{name}: {describe(task.options_type)}"
        for name, task in sorted(TASKS.items())
        if task.options_type is not None
    ]
    lines += sorted(describe(each.type) for each in decoders)
    lines += [
        f"{name}: {value.format}"
        for module in (frames, endpoint)
        for name, value in sorted(vars(module).items())
        if isinstance(value, struct.Struct)
    ]
    lines += map(describe, (frames.FrameType, frames.Method, endpoint.Endpoint))
    lines += [repr(PRIORITIES), repr([each.str for each in codec._DTYPES]), repr(codec._ARRAY)]
    return "\n".join(lines)


def describe(kind: Any) -> str:
    """Describe a type by its structure. The name of a class does not travel."""
    origin = get_origin(kind)
    if kind is Ellipsis:
        return "..."
    if origin is np.ndarray:
        return f"array of {get_args(get_args(kind)[1])[0].__name__}"
    if origin is Literal:
        return repr(get_args(kind))
    if origin is not None:
        arguments = list(map(describe, get_args(kind)))
        name = getattr(origin, "__name__", "")
        is_union = name in ("Union", "UnionType")
        return " | ".join(arguments) if is_union else f"{name}[{', '.join(arguments)}]"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "(" + ", ".join(f"{each.name} = {each.value!r}" for each in kind) + ")"
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        return "(" + ", ".join(f"{name}: {describe(hints[name])}" for name in kind._fields) + ")"
    return "None" if kind is type(None) else getattr(kind, "__name__", repr(kind))
