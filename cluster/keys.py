"""`hundredfold keys`: create, list and revoke API keys. Servers apply changes within a second."""

from __future__ import annotations

import argparse
import os
import re
import sys
from datetime import MAXYEAR, UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deployments.command_line import OK
from deployments.config import KEY_FILE_VARIABLE, expand_home
from deployments.console import add_json_option, format_table, print_json, print_text
from deployments.errors import BadSetting
from deployments.keys.key import (
    ANY_MODEL,
    ApiKey,
    KeyLimits,
    Scope,
    generate_key,
    hash_key,
    key_id,
)
from deployments.keys.key_file import KeyFile, change_key_file, read_key_file

AGE = re.compile(r"(\d+)([dhm])")
UNITS = {"d": "days", "h": "hours", "m": "minutes"}

HEAD = ("name", "id", "scopes", "models", "expires", "limits")


class AddKey:
    """Command `hundredfold keys add NAME`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", help="who uses the key; in metrics, usage and messages")
        parser.add_argument(
            "--scope",
            action="append",
            choices=list(Scope),
            dest="scopes",
            help="infer: run models; gpu: on GPUs too; admin: metrics, usage, models. "
            "Repeatable (default: infer)",
        )
        parser.add_argument(
            "--model",
            action="append",
            metavar="PATTERN",
            dest="models",
            help="models that the key may use, as `org/*`. Repeatable (default: all)",
        )
        parser.add_argument(
            "--expires", metavar="WHEN", help="a date, or an age such as 90d, 12h or 30m"
        )
        for option, help_text in (
            ("--requests-per-minute", "requests of the whole cluster"),
            ("--tokens-per-minute", "tokens of prompts and answers"),
            ("--concurrent-requests", "requests at the same time"),
        ):
            parser.add_argument(option, type=int, metavar="N", help=f"{help_text} (default: any)")
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


class RevokeKey:
    """Command `hundredfold keys revoke NAME`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("key", help="name or id of the key")
        _add_common(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        revoked: list[ApiKey] = []

        def revoke(content: KeyFile) -> KeyFile:
            revoked.extend(key for key in content.keys if arguments.key in (key.name, key.id))
            if not revoked:
                raise BadSetting(f"`{arguments.file}` has no key `{arguments.key}`")
            return KeyFile(keys=tuple(key for key in content.keys if key not in revoked))

        read_key_file(arguments.file)  # raises if the file is missing
        change_key_file(arguments.file, revoke)
        if arguments.json:
            return print_json([_describe(key) for key in revoked])
        print(f"revoked {', '.join(key.name for key in revoked)}")
        return OK


ADD, LIST, REVOKE = AddKey(), ListKeys(), RevokeKey()


def default_key_file() -> Path:
    """Return the path in $HUNDREDFOLD_KEYS, or ~/.config/hundredfold/keys.json."""
    return expand_home(os.environ.get(KEY_FILE_VARIABLE) or "~/.config/hundredfold/keys.json")


def build_entry(key: str, arguments: argparse.Namespace) -> ApiKey:
    """Build the entry of the key file. Raises BadSetting, which names the invalid option."""
    now = datetime.now(UTC).replace(microsecond=0)
    try:
        return ApiKey(
            id=key_id(key),
            name=arguments.name,
            sha256=hash_key(key).hex(),
            scopes=tuple(Scope(scope) for scope in arguments.scopes or (Scope.INFER,)),
            models=tuple(arguments.models or (ANY_MODEL,)),
            created=now,
            expires=parse_expiry(arguments.expires, now) if arguments.expires else None,
            limits=KeyLimits(**{name: getattr(arguments, name) for name in KeyLimits.model_fields}),
        )
    except ValidationError as exc:
        error = exc.errors()[0]
        raise BadSetting(f"`{error['loc'][-1]}`: {error['msg']}, not {error['input']!r}") from exc


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


def _parse_time(text: str) -> datetime:
    parsed = datetime.fromisoformat(text)
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file",
        type=Path,
        default=default_key_file(),
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
