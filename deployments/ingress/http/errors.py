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
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Raise the ServeErrors of the block as `rename_field` by `names`."""
    try:
        yield
    except ServeError as error:
        told = rename_field(error, names)
        if told is error:
            raise
        raise told from error


def rename_field(error: ServeError, names: Mapping[str, str]) -> ServeError:
    """The error, its field called by `names`: the longest fitting prefix of these is replaced.

    Errors name the fields of our own request; another API's client knows them by other names.
    What is reworded is a copy, because requests that share a computation get one and the same.
    """
    field = error.field
    if field is None:
        return error
    prefix = max((n for n in names if _begins(field, n)), key=len, default=None)
    if prefix is None:
        return error
    told = copy.copy(error)
    told.field = names[prefix] + field.removeprefix(prefix)
    told.message = error.message.replace(f"`{prefix}", f"`{names[prefix]}")
    return told


def _begins(field: str, prefix: str) -> bool:
    """Whether the path of a field begins with all the steps of another."""
    rest = field.removeprefix(prefix)
    return field.startswith(prefix) and (rest[:1] in ("", ".", "[") or prefix.endswith("."))


def status_and_type(
    error: ServeError,
    known: Mapping[type[ServeError], tuple[int, str]],
    *,
    refused: str,
    failed: str,
) -> tuple[int, str]:
    """What an API says of a kind of error: the first row of `known` that fits.

    Others keep their status, and are `refused` below 500, else `failed`.
    """
    rows = (told for kind, told in known.items() if isinstance(error, kind))
    return next(rows, (error.status, refused if error.status < 500 else failed))


def truncate_error(error: ServeError) -> ServeError:
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
