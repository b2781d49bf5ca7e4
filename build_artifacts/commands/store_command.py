"""What all commands on an artifact store share: exit codes, errors and the named model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from build_artifacts.errors import BuildError, is_write_failure
from deployments.errors import ArtifactError, ServeError
from deployments.plan.plan_file import read_plan
from deployments.plan.resolution import find_for_inspection
from deployments.terminal.command_line import INTERRUPTED, print_error

MODEL_HELP = "ID, ID@VERSION or ID@ALIAS; default: ID@latest"

RunCommand = Callable[[argparse.Namespace], int]


def store_command(run: RunCommand) -> RunCommand:
    """Decorate the `run` of a command that uses the artifact store `arguments.store`.

    It returns the exit code of `run`, or INTERRUPTED after Ctrl-C. It raises ServeError, mostly a
    BuildError with a hint, for every foreseen failure.
    """

    @wraps(run)
    def run_command(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except ArtifactError as error:
            hint = "list the store with `hundredfold models ls`"
            raise BuildError(error.message, hint=hint) from error
        except KeyboardInterrupt:
            hint = "run the command again; a build continues after its last finished step"
            return print_error("interrupted", hint, code=INTERRUPTED)
        except NotADirectoryError as error:
            hint = f"a file in {arguments.store} is in place of a directory: move it elsewhere"
            raise BuildError(str(error), hint=hint) from error
        except Exception as error:
            if isinstance(error, ServeError) or not is_write_failure(error):
                raise
            hint = f"check space and permissions of {arguments.store}; run the command again"
            raise BuildError(str(error), hint=hint) from error

    return run_command


def find_model(arguments: argparse.Namespace) -> Path:
    """Return the directory of the version named `arguments.model`.

    Raises ArtifactError, or BadSetting if the `plan.json` of the store is invalid.
    """
    return find_for_inspection(arguments.store, read_plan(arguments.store), arguments.model)


SHOW_MEASUREMENTS = "show the measurements of the build with `hundredfold models report`"


def encoders_only_error(command: str, reason: str, *, hint: str = SHOW_MEASUREMENTS) -> BuildError:
    """Build the error of a command for a model that generates text."""
    return BuildError(
        f"`{command}` does not support models that generate text: {reason}", hint=hint
    )
