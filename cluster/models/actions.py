"""`hundredfold models alias|promote|...|rm|gc`: changes of a store, without a server.

Running servers apply them within 2 s.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from cluster.config_entries import read_args
from cluster.configured_store import read_config
from cluster.default_config import CONFIG_HELP, find_config
from cluster.models.store_check import check_store_exists
from deployments.artifacts.store import LATEST_NAME
from deployments.errors import BadSetting
from deployments.management import garbage, removal
from deployments.management.actions import ACTIONS, Action
from deployments.management.listing import ModelEntry
from deployments.terminal.command_line import OK
from deployments.terminal.console import add_json_option, add_store_option, print_json

NAME_HELP = "model id, or ID@VERSION, or ID@ALIAS"
VERSION_HELP = "ID@VERSION or ID@ALIAS; without `@`, the newest build"


@dataclass(frozen=True, slots=True)
class ActionCommand:
    """Command that applies one action, such as `promote`, to a model of a store.

    Required arguments of the action are positional. Its flags are options.
    """

    action: Action

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        help_text = VERSION_HELP if self.action.takes_version else "model id"
        parser.add_argument("name", help=help_text)
        for name, field in self.action.arguments.model_fields.items():
            if field.is_required():
                parser.add_argument(name, type=_find_type(field), help=field.description)
            else:
                parser.add_argument(f"--{name}", action="store_true", help=field.description)
        _add_common(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        kind = self.action.arguments
        try:
            given = kind(**{name: getattr(arguments, name) for name in kind.model_fields})
        except ValidationError as exc:
            error = exc.errors()[0]
            raise BadSetting(
                f"`{error['loc'][-1]}`: {error['msg']}, not {error['input']!r}"
            ) from exc
        configured = dict(_list_configured(find_config(arguments.config)))
        check_store_exists(arguments.store)
        entry = self.action.run(arguments.store, arguments.name, given, configured)
        if arguments.json:
            return print_json(entry.model_dump(mode="json"))
        print("\n".join(describe(entry)))
        return OK


class RemoveCommand:
    """Command `hundredfold models rm NAME`, which removes a model or one of its versions."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", help=NAME_HELP)
        _add_common(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        models = _list_configured(find_config(arguments.config))
        check_store_exists(arguments.store)
        removed = removal.remove(
            arguments.store, arguments.name, dict(models), _list_versions(models)
        )
        if arguments.json:
            return print_json({"name": arguments.name, "versions": removed})
        print(f"removed {arguments.name}: {', '.join(removed) or 'the record of its build'}")
        return OK


class CollectCommand:
    """Command `hundredfold models gc`, which removes versions that nothing names."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--keep",
            action="append",
            default=[],
            metavar="ID@VERSION",
            help="version to retain, repeatable",
        )
        parser.add_argument("--yes", action="store_true", help="remove without confirmation")
        _add_common(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        check_store_exists(arguments.store)
        models = _list_configured(find_config(arguments.config))
        keep = [*arguments.keep, *_list_versions(models)]
        found = garbage.find_garbage(arguments.store, keep, dict(models))
        if not arguments.json:
            print(garbage.describe(found), flush=True)
        is_hidden = arguments.json or not sys.stdout.isatty()
        if found.items and not arguments.yes and is_hidden:
            print(garbage.describe(found), file=sys.stderr)  # the user confirms this list
        removed: tuple[garbage.GarbageItem, ...] = ()
        if found.items and (arguments.yes or _is_confirmed()):
            removed = garbage.remove(found)
            if not arguments.json:
                print(f"removed {len(removed)}, {sum(item.size for item in removed) / 1e6:.1f} MB")
        if arguments.json:
            gone = {item.path for item in removed}
            return print_json(
                [
                    {
                        "kind": item.kind,
                        "name": item.name,
                        "bytes": item.size,
                        "reason": item.reason,
                        "is_removed": item.path in gone,
                    }
                    for item in found.items
                ]
            )
        return OK


ALIAS, PROMOTE, ROLLBACK, SPLIT, SHADOW, PIN, UNPIN = (
    ActionCommand(ACTIONS[name])
    for name in ("alias", "promote", "rollback", "split", "shadow", "pin", "unpin")
)
REMOVE, COLLECT = RemoveCommand(), CollectCommand()


def describe(entry: ModelEntry) -> list[str]:
    """Return a line for the model, then a line per version, newest first."""
    lines = [f"{entry.id}{' (pinned)' if entry.pinned else ''}"]
    for version in entry.versions:
        parts = [f"  {version.version}", f"{version.percent:g} %", ", ".join(version.aliases)]
        if entry.shadow is not None and entry.shadow.version == version.version:
            parts.append(f"shadows {entry.shadow.percent:g} %")
        if version.reason:
            parts.append(f"refused: {version.reason}")
        lines.append("  ".join(filter(None, parts)))
    return lines


def _list_configured(config: Path) -> list[tuple[str, str]]:
    """Return id and version of the models of all applications in a config.

    Raises BadSetting if the file cannot be read or has no application of this project.
    """
    if not (applications := list(read_args(read_config(config)))):
        raise BadSetting(f"`{config}` has no application of this project; name a Serve config")
    listed = (args.get("models") for args in applications)
    models = (model for each in listed if isinstance(each, list) for model in each)
    return [
        (str(model.get("id")), str(model.get("version", LATEST_NAME)))
        for model in models
        if isinstance(model, dict)
    ]


def _list_versions(models: list[tuple[str, str]]) -> list[str]:
    """List configured versions as `id@version`. Applications may serve several of one model."""
    return [f"{model}@{version}" for model, version in models if version != LATEST_NAME]


def _is_confirmed() -> bool:
    if not sys.stdin.isatty():
        raise BadSetting(
            "standard input is not a terminal, so the removal cannot be confirmed; pass `--yes` "
            "to remove all of it"
        )
    try:
        print("remove them? [y/N] ", end="", file=sys.stderr, flush=True)
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _find_type(field: FieldInfo) -> type[str] | type[float]:
    return float if field.annotation is float else str


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_store_option(parser)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"config of the server, for its store and the versions that it names; {CONFIG_HELP}",
    )
    add_json_option(parser)
