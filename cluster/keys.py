"""`hundredfold keys`: create, list, change and revoke API keys.

Servers apply changes within a second.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from datetime import MAXYEAR, UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from deployments.config import KEY_FILE_VARIABLE, expand_home
from deployments.errors import BadSetting
from deployments.keys.key import (
    ApiKey,
    KeyLimits,
    Scope,
    generate_key,
    hash_key,
    key_id,
)
from deployments.keys.key_file import KeyFile, change_key_file, read_key_file
from deployments.terminal.command_line import OK
from deployments.terminal.console import add_json_option, format_table, print_json, print_text

AGE = re.compile(r"(\d+)([dhm])")
UNITS = {"d": "days", "h": "hours", "m": "minutes"}

ANY, NEVER = "any", "never"  # options of a key without this limit, without an end
HEAD = ("name", "id", "scopes", "models", "expires", "limits")


class AddKey:
    """Command `hundredfold keys add NAME`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", help="who uses the key; in metrics, usage and messages")
        _add_permissions(parser)
        _add_common(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        key = generate_key()
        entry = build_entry(key, arguments)

        def add(content: KeyFile) -> KeyFile:
            if any(existing.name == entry.name for existing in content.keys):
                raise BadSetting(
                    f"`{arguments.file}` has a key named `{entry.name}`. Revoke it or choose "
                    "another name."
                )
            return KeyFile(keys=(*content.keys, entry))

        change_key_file(arguments.file, add)
        if arguments.json:
            return print_json({"key": key, **_describe(entry)})
        print(key)
        print(
            f"\nThis is the only time it is shown; `{arguments.file}` has its digest. Serve with "
            f"`hundredfold serve --keys {arguments.file}`.",
            file=sys.stderr,
        )
        return OK


class ListKeys:
    """Command `hundredfold keys ls`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_common(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        keys = read_key_file(arguments.file).keys
        if arguments.json:
            return print_json([_describe(key) for key in keys])
        return print_text(format_table([HEAD, *map(_columns, keys)]))


class ChangeKey:
    """Command `hundredfold keys change NAME`, which keeps the secret of the key."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("key", help="name or id of the key; options that are left out stay")
        _add_permissions(parser)
        _add_common(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        if _read_permissions(arguments, KeyLimits()) == {"limits": KeyLimits().model_dump()}:
            raise BadSetting("no option names what to change (see `--help`)")
        changed: dict[ApiKey, ApiKey] = {}

        def change(content: KeyFile) -> KeyFile:
            for key in _find_keys(content, arguments):
                fields = key.model_dump() | _read_permissions(arguments, key.limits)
                changed[key] = _build_key(fields)
            return KeyFile(keys=tuple(changed.get(key, key) for key in content.keys))

        read_key_file(arguments.file)  # raises if the file is missing
        change_key_file(arguments.file, change)
        if arguments.json:
            return print_json([_describe(key) for key in changed.values()])
        return print_text(format_table([HEAD, *map(_columns, changed.values())]))


class RevokeKey:
    """Command `hundredfold keys revoke NAME`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("key", help="name or id of the key")
        _add_common(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        revoked: list[ApiKey] = []

        def revoke(content: KeyFile) -> KeyFile:
            revoked.extend(_find_keys(content, arguments))
            return KeyFile(keys=tuple(key for key in content.keys if key not in revoked))

        read_key_file(arguments.file)  # raises if the file is missing
        change_key_file(arguments.file, revoke)
        if arguments.json:
            return print_json([_describe(key) for key in revoked])
        print(f"revoked {', '.join(key.name for key in revoked)}")
        return OK


ADD, LIST, CHANGE, REVOKE = AddKey(), ListKeys(), ChangeKey(), RevokeKey()


def build_entry(key: str, arguments: argparse.Namespace) -> ApiKey:
    """Build the entry of the key file. Raises BadSetting, which names the invalid option."""
    return _build_key(
        {
            "id": key_id(key),
            "name": arguments.name,
            "sha256": hash_key(key).hex(),
            "created": _now(),
            **_read_permissions(arguments, KeyLimits()),
        }
    )


def _build_key(fields: Mapping[str, Any]) -> ApiKey:
    """Validate the fields of a key. Raises BadSetting, which names the invalid option."""
    try:
        return ApiKey(**fields)
    except ValidationError as exc:
        error = exc.errors()[0]
        name = str(error["loc"][-1])
        option = f"--{name.replace('_', '-')}" if name in KeyLimits.model_fields else name
        raise BadSetting(f"`{option}`: {error['msg']}, not {error['input']!r}") from exc


def _read_permissions(arguments: argparse.Namespace, limits: KeyLimits) -> dict[str, Any]:
    """Return the fields of a key that the options name. Limits that they do not name stay."""
    fields: dict[str, Any] = {"limits": limits.model_dump()}
    for name in KeyLimits.model_fields:
        if (value := getattr(arguments, name)) is not None:
            fields["limits"][name] = None if value == ANY else value
    if arguments.scopes:
        fields["scopes"] = arguments.scopes
    if arguments.models:
        fields["models"] = arguments.models
    if arguments.expires is not None:
        is_never = arguments.expires == NEVER
        fields["expires"] = None if is_never else parse_expiry(arguments.expires, _now())
    return fields


def parse_expiry(text: str, now: datetime) -> datetime:
    """Parse a date or time of ISO 8601, or a duration such as 90d, counted from `now`.

    A time without an offset is in UTC. Raises BadSetting for other texts and for past times.
    """
    age = AGE.fullmatch(text)
    try:
        parsed = now + timedelta(**{UNITS[age[2]]: int(age[1])}) if age else _parse_time(text)
    except OverflowError as exc:
        raise BadSetting(f"`--expires {text}` is after the year {MAXYEAR}") from exc
    except ValueError as exc:
        raise BadSetting(
            f"`--expires {text}` is neither a date such as 2030-01-31 nor an age such as 90d"
        ) from exc
    if parsed <= now:
        raise BadSetting(f"`--expires {text}` is not in the future")
    return parsed


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _find_keys(content: KeyFile, arguments: argparse.Namespace) -> list[ApiKey]:
    """Return the keys with this name or id. Raises BadSetting if there is none."""
    found = [key for key in content.keys if arguments.key in (key.name, key.id)]
    if not found:
        raise BadSetting(f"`{arguments.file}` has no key `{arguments.key}`")
    return found


def _parse_time(text: str) -> datetime:
    parsed = datetime.fromisoformat(text)
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def _add_permissions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scope",
        action="append",
        choices=[scope.value for scope in Scope],
        dest="scopes",
        help="infer: run models; gpu: on GPUs too; metrics: read metrics and usage; admin: this "
        "and manage models. "
        "Repeatable (a new key: infer)",
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="PATTERN",
        dest="models",
        help="models that the key may use, as `org/*`. Repeatable (a new key: all)",
    )
    parser.add_argument(
        "--expires",
        metavar="WHEN",
        help=f"a date, an age such as 90d, 12h or 30m, or `{NEVER}` (a new key: {NEVER})",
    )
    for option, help_text in (
        ("--requests-per-minute", "requests of the whole cluster"),
        ("--tokens-per-minute", "tokens of prompts and answers"),
        ("--concurrent-requests", "requests at the same time"),
    ):
        parser.add_argument(
            option, metavar="N", help=f"{help_text}; `{ANY}`: no limit (a new key: {ANY})"
        )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file",
        type=expand_home,  # of a default, argparse expands it only where the option is missing
        default=os.environ.get(KEY_FILE_VARIABLE) or "~/.config/hundredfold/keys.json",
        help=f"key file (default: ${KEY_FILE_VARIABLE}, else %(default)s)",
    )
    add_json_option(parser)


def _describe(key: ApiKey) -> dict[str, Any]:
    facts = key.model_dump(mode="json", exclude={"sha256"})
    return {**facts, "expired": key.is_expired()}


def _columns(key: ApiKey) -> tuple[str, ...]:
    expires = "never" if key.expires is None else f"{key.expires:%Y-%m-%d %H:%M}"
    limits = key.limits.model_dump(exclude_none=True)
    return (
        key.name,
        key.id,
        ",".join(key.scopes),
        ",".join(key.models),
        f"{expires} (expired)" if key.is_expired() else expires,
        ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in limits.items()) or "none",
    )
