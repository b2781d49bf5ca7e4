"""Errors in the words of the API that was asked, and never longer than a person reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deployments.errors import ServeError

# What clients sent is named in errors: a model id, a key. It may have been megabytes.
MESSAGE_CHARS = 1_000
FIELD_CHARS = 200


@contextmanager
def fields_called(names: Mapping[str, str]) -> Iterator[None]:
    """Reword the ServeErrors of the block: the longest fitting prefix of `names` is replaced.

    Errors name the fields of our own request; another API's client knows them by other names.
    The error raised is a copy, because requests that share a computation get one and the same.
    """
    try:
        yield
    except ServeError as error:
        if error.field is None:
            raise
        prefix = max((n for n in names if error.field.startswith(n)), key=len, default=None)
        if prefix is None:
            raise
        reworded = copy.copy(error)
        reworded.field = names[prefix] + error.field.removeprefix(prefix)
        reworded.message = error.message.replace(f"`{prefix}", f"`{names[prefix]}")
        raise reworded from error


def told_briefly(error: ServeError) -> ServeError:
    """The error with nothing in it that is too long to read or that JSON cannot carry."""
    message = readable(error.message, MESSAGE_CHARS)
    field = None if error.field is None else readable(error.field, FIELD_CHARS)
    if (message, field) == (error.message, error.field):
        return error
    brief = copy.copy(error)
    brief.message, brief.field = message, field
    return brief


def readable(text: str, chars: int) -> str:
    """`text` without lone surrogates, its middle left out where it has more than `chars`."""
    if len(text) > chars:
        text = f"{text[: chars // 2]} ... {text[-chars // 2 :]}"
    return text.encode("utf-8", "replace").decode()
