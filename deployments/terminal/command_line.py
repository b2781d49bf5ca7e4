"""Trees of subcommands with lazy imports, error hints, exit codes and argparse types for numbers.

Exit codes of every command:

    0    success
    1    the command failed and printed the reason, or the reader of its output (`head`) has ended
    2    the command line is wrong
    78   the config cannot be served until it is changed (only `hundredfold serve`)
    130  interrupted
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import resource
import select
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, TypeAlias

from deployments.errors import ServeError
from deployments.host.gpus import order_by_bus
from deployments.host.machine import advise_install, installed_versions

OK, FAILED, UNUSABLE_CONFIG, INTERRUPTED = 0, 1, os.EX_CONFIG, 130
STDOUT = 1  # file descriptor
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

# Packages of this project. Any other module that is missing belongs to a pip extra.
OWN_PACKAGES = ("hundredfold", "deployments", "build_artifacts", "cluster", "benchmarks")


class HintedError(ServeError):
    """Base of the errors of commands. `hint` is the remedy, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Command(Protocol):
    """Interface of a module that implements a subcommand."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A subcommand. Its module is imported only if the command line names the subcommand.

    An import of the modules of all subcommands would delay every command.
    """

    target: str  # `package.module`, or `package.module:attribute` if a module has several commands
    help: str
    extra: str = ""  # pip extra that installs what the module imports

    def load(self) -> Command:
        command: Command = _load(self.target)
        return command


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """Subcommands under one name, such as those of `hundredfold keys`."""

    help: str
    commands: Mapping[str, CommandSpec]


Tree: TypeAlias = Mapping[str, CommandSpec | CommandGroup]


@dataclass(frozen=True, slots=True)
class Program:
    """A command tree with its name, description and examples.

    `store_finder` is the `package.module:function` that returns the store for commands without
    `--store`. Its argument is the Serve config that the command line names, or None. Without a
    finder, the default store is used.
    """

    name: str
    description: str
    tree: Tree
    examples: str = ""
    store_finder: str = ""

    def run(self, argv: Sequence[str]) -> int:
        """Parse `argv` and run the command; return its exit code.

        Expected failures are printed to stderr. `arguments.command_line` has the whole command
        line as text.
        """
        order_by_bus()  # commands import CUDA's libraries later
        spec = _find_command(self.tree, argv)
        try:
            parser = self.build_parser([spec] if spec else [])
            arguments, unknown = parser.parse_known_args(argv)
            if unknown:  # argparse would print the usage of the whole program
                arguments.command_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
            arguments.command_line = f"{self.name} {shlex.join(argv)}"
            self._fill_in_store(arguments)
            run: Callable[[argparse.Namespace], int] = arguments.run_command
            code = run(arguments)
            sys.stdout.flush()
            return code
        except ServeError as error:
            return print_error(error.message, error.hint if isinstance(error, HintedError) else "")
        except ModuleNotFoundError as error:
            if spec is None or _is_own(error):
                raise
            hint = advise_install(spec.extra) if spec.extra else ""
            return print_error(f"`{error.name}` is not installed", hint)
        except KeyboardInterrupt:
            return print_error("interrupted", code=INTERRUPTED)
        except MemoryError:
            return print_error("the command needs more memory than it may use")
        except OSError as error:
            return _report_system_error(error)

    def build_parser(self, loaded: Iterable[CommandSpec] | None = None) -> argparse.ArgumentParser:
        """Return the argparse tree, with the arguments of the `loaded` commands (None: all)."""
        parser = argparse.ArgumentParser(
            prog=self.name,
            description=self.description,
            epilog=self.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        version = installed_versions((self.name,)).get(self.name, "of an unknown version")
        parser.add_argument("--version", action="version", version=f"{self.name} {version}")
        _add_commands(parser, self.tree, None if loaded is None else list(loaded))
        return parser

    def _fill_in_store(self, arguments: argparse.Namespace) -> None:
        """Replace a missing `arguments.store`. Raises BadSetting if there is no such store."""
        if getattr(arguments, "store", "") is not None:
            return
        if self.store_finder:
            arguments.store = _load(self.store_finder)(getattr(arguments, "config", None))
        else:
            from deployments.config import default_store  # late: most commands need no pydantic

            arguments.store = default_store()


def _is_own(error: ModuleNotFoundError) -> bool:
    return (error.name or "").partition(".")[0] in OWN_PACKAGES


def _load(target: str) -> Any:
    """Return `package.module`, or the attribute that `package.module:attribute` names."""
    module, _, attribute = target.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


@contextmanager
def show_activity(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner and a text on stderr in the block; yield a function that changes the text.

    Erase the line at the end of the block. If stderr is not a terminal, show nothing.
    """
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console  # takes longer to import than most commands run

    console = Console(file=sys.stderr, force_terminal=True)
    with console.status(text) as status:
        yield lambda text: status.update(text)


def _has_reader(descriptor: int) -> bool:
    """Return False if the descriptor is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _report_system_error(error: OSError) -> int:
    """Print what the user can do about the error; return the exit code. Raise an unknown error."""
    if isinstance(error, BrokenPipeError) and not _has_reader(STDOUT):
        _discard_stdout()
        return FAILED
    if error.errno in DISK_ERRORS:
        try:
            sys.stdout.flush()  # another file may have failed
        except OSError:
            _discard_stdout()
        place = "" if error.filename is None else f" `{error.filename}`"
        return print_error(f"cannot write{place}: {error.strerror}")
    if error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return print_error(
            f"this process may have {limit} open files, and needs more",
            "raise the limit: `ulimit -n 65536`, or `--ulimit nofile=65536` of the container",
        )
    raise error


def _discard_stdout() -> None:
    """Discard what stdout has not written. Python flushes it at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)


def print_error(message: str, hint: str = "", *, code: int = FAILED) -> int:
    """Print `error:` and `hint:` to stderr; return the exit code."""
    print(f"error: {message}" + (f"\n\nhint: {hint}" if hint else ""), file=sys.stderr)
    return code


def _add_commands(
    parser: argparse.ArgumentParser, tree: Tree, loaded: list[CommandSpec] | None
) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, node in tree.items():
        child = commands.add_parser(
            name,
            help=node.help,
            description=node.help + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if isinstance(node, CommandGroup):
            _add_commands(child, node.commands, loaded)
        elif loaded is None:
            with _ignore_missing_extras():
                node.load().add_arguments(child)
        elif node in loaded:
            command = node.load()
            command.add_arguments(child)
            child.set_defaults(run_command=command.run, command_parser=child)


@contextmanager
def _ignore_missing_extras() -> Iterator[None]:
    """Leave a command without arguments if its module needs an extra that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if _is_own(error):
            raise


def _find_command(tree: Tree, argv: Sequence[str]) -> CommandSpec | None:
    """Return the command that `argv` names, so that only its module is imported."""
    for word in argv:
        node = tree.get(word)
        if isinstance(node, CommandSpec):
            return node
        if isinstance(node, CommandGroup):
            tree = node.commands
    return None


def count_from_zero(text: str) -> int:
    """Parse an integer of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def positive_count(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_number(text: str) -> float:
    """Parse a finite number above 0, for argparse."""
    value = float(text)
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def positive_seconds(text: str) -> float:
    """Parse a number of seconds above 0 and below one day, for argparse."""
    value = float(text)
    if not 0 < value < 86_400:
        raise argparse.ArgumentTypeError("must be more than 0 seconds and less than a day")
    return value
