"""Conversion of errors for an API: field names, status, and length of messages."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from deployments.errors import ServeError

# Limits of error responses. Messages quote texts of clients, such as a model id of megabytes.
MAX_MESSAGE_CHARS = 1_000
MAX_FIELD_CHARS = 200


@contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Apply `rename_field` to ServeErrors raised in the block."""
    try:
        yield
    except ServeError as error:
        renamed = rename_field(error, names)
        if renamed is error:
            raise
        raise renamed from error


def rename_field(error: ServeError, names: Mapping[str, str]) -> ServeError:
    """Replace the longest prefix of the error's field that is a key of `names`.

    The message gets the new name too. Errors name fields of the internal request. Each API has
    other names for these fields. A changed error is a copy, because requests that share a
    computation share its error.
    """
    field = error.field
    if field is None:
        return error
    prefix = max((name for name in names if _is_path_prefix(name, field)), key=len, default=None)
    if prefix is None:
        return error
    renamed = copy.copy(error)
    renamed.field = names[prefix] + field.removeprefix(prefix)
    renamed.message = error.message.replace(f"`{prefix}", f"`{names[prefix]}")
    return renamed


def _is_path_prefix(prefix: str, field: str) -> bool:
    """Return whether the path `field` starts with all steps of `prefix`."""
    remaining = field.removeprefix(prefix)
    return field.startswith(prefix) and (remaining[:1] in ("", ".", "[") or prefix.endswith("."))


def status_and_type(
    error: ServeError,
    known: Mapping[type[ServeError], tuple[int, str]],
    *,
    refused: str,
    failed: str,
) -> tuple[int, str]:
    """Return status and error type for an API: the first entry of `known` whose class fits.

    Without an entry, the error keeps its status. Its type is `refused` below 500, else `failed`.
    """
    entries = (entry for kind, entry in known.items() if isinstance(error, kind))
    return next(entries, (error.status, refused if error.status < 500 else failed))


def replace_status_422(error: ServeError) -> int:
    """Return the status of an error in an API that has 400 in place of 422."""
    return 400 if error.status == 422 else error.status


def truncate_error(error: ServeError) -> ServeError:
    """Shorten message and field, and replace characters that JSON cannot encode."""
    message = shorten_text(error.message, MAX_MESSAGE_CHARS)
    field = None if error.field is None else shorten_text(error.field, MAX_FIELD_CHARS)
    if (message, field) == (error.message, error.field):
        return error
    shortened = copy.copy(error)
    shortened.message, shortened.field = message, field
    return shortened


def shorten_text(text: str, max_chars: int) -> str:
    """Cut the middle out of a text longer than `max_chars`; replace lone surrogates."""
    if len(text) > max_chars:
        text = f"{text[: max_chars // 2]} ... {text[-max_chars // 2 :]}"
    return text.encode("utf-8", "replace").decode()
