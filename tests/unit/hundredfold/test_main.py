"""The command tree of `hundredfold`."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.__main__ import COMMANDS
from deployments.errors import ServeError
from deployments.host.machine import advise_install
from deployments.terminal.command_line import Command, CommandGroup, CommandSpec, Program, Tree
from deployments.terminal.console import add_store_option
from hundredfold.__main__ import build_program, main
from tests.support.no_home import remove_home

CONFIG = Path(__file__).parents[3] / "serve_config.yaml"


class FailingCommand:
    def add_arguments(self, parser: object) -> None: ...

    def run(self, arguments: object) -> int:
        raise ServeError("the store is gone")


class InterruptedCommand(FailingCommand):
    def run(self, arguments: object) -> int:
        raise KeyboardInterrupt


class LargeCommand(FailingCommand):
    def run(self, arguments: object) -> int:
        raise MemoryError


class ReadingCommand(FailingCommand):
    def run(self, arguments: object) -> int:
        return len(CONFIG.read_bytes())


class ListingCommand:
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_store_option(parser)

    def run(self, arguments: object) -> int:
        return 0


FAILING, INTERRUPTED_COMMAND = FailingCommand(), InterruptedCommand()
LARGE, READING, LISTING = LargeCommand(), ReadingCommand(), ListingCommand()


# Commands without `--json`: they run until they are stopped, or print a path, a line or a script.
WITHOUT_RESULT = {
    *("serve", "build", "demo", "models drain", "models migrate", "render", "env", "completion"),
    *("dashboard", "alerts", "bench tables"),
}


def program_with(**commands: str) -> Program:
    return Program("toy", "A toy.", {name: CommandSpec(f, name) for name, f in commands.items()})


def test_commands_index_gpus_as_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert program_with(fail=f"{__name__}:FAILING").run(["fail"]) == 1
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_command_of_the_cluster_needs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "toy", CommandSpec("toy", "Toy"))
    assert "toy" in build_program().tree


def test_every_command_has_options_and_a_handler() -> None:
    program = build_program()
    assert {"serve", "build", "models", "check", "bench", "completion"} <= program.tree.keys()
    parser = program.build_parser()  # imports every command
    for name, node in program.tree.items():
        names = node.commands if isinstance(node, CommandGroup) else [None]
        for child in names:
            with pytest.raises(SystemExit) as exited:
                parser.parse_args([name, *([child] if child else []), "--help"])
            assert exited.value.code == 0


def commands_without_json(tree: Tree, prefix: str = "") -> Iterator[str]:
    for name, node in tree.items():
        if isinstance(node, CommandGroup):
            yield from commands_without_json(node.commands, f"{prefix}{name} ")
            continue
        parser = argparse.ArgumentParser()
        node.load().add_arguments(parser)
        if "--json" not in parser.format_help():
            yield f"{prefix}{name}"


def test_every_command_with_a_result_prints_json() -> None:
    assert set(commands_without_json(build_program().tree)) == WITHOUT_RESULT


def test_check_prints_problems_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("applicatons: []\n")
    assert main(["check", str(config), "--json"]) == 1
    (problem, *_) = json.loads(capsys.readouterr().out)
    assert problem["line"] == 1


def test_check_runs_through_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(CONFIG)]) == 0
    assert "no problems" in capsys.readouterr().out


def test_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as exited:
        main(["models", "polish"])
    assert exited.value.code == 2


def test_wrong_option_prints_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["models", "ls", "--bogus"])
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: hundredfold models ls ")
    assert error.endswith("error: unrecognized arguments: --bogus\n")


def test_user_without_a_home_may_name_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remove_home(monkeypatch)
    monkeypatch.delenv("HUNDREDFOLD_STORE", raising=False)
    assert main(["models", "ls"]) == 1
    assert "set $HOME" in capsys.readouterr().err
    assert main(["models", "ls", "--store", str(tmp_path)]) == 0
    main(["doctor", "--json"])
    (finding,) = (
        finding
        for finding in json.loads(capsys.readouterr().out.partition("\n")[2])["findings"]
        if finding["name"] == "store"
    )
    assert finding["level"] == "problem"
    assert "set $HOME" in finding["found"]


def test_foreseen_failure_prints_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert program_with(break_it=f"{__name__}:FAILING").run(["break_it"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: the store is gone\n")


@pytest.mark.usefixtures("no_collection")  # a collection may close files
def test_limit_of_open_files_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open(os.devnull, os.O_RDONLY)
    os.close(spare)  # the lowest descriptor that is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limits[1]))
    try:
        assert program_with(read=f"{__name__}:READING").run(["read"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    error = capsys.readouterr().err
    assert error.startswith(f"error: this process may have {spare} open files")
    assert "ulimit -n" in error


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    for program, version in (("hundredfold", metadata.version("hundredfold")), ("toy", "unknown")):
        with pytest.raises(SystemExit) as exited:
            Program(program, "A program.", {}).run(["--version"])
        assert exited.value.code == 0
        assert version in capsys.readouterr().out


def test_interrupt_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert program_with(stop=f"{__name__}:INTERRUPTED_COMMAND").run(["stop"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_lack_of_memory_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert program_with(large=f"{__name__}:LARGE").run(["large"]) == 1
    assert capsys.readouterr().err.startswith("error: the command needs more memory")


def test_missing_package_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"draw": CommandSpec("no_such_package.module", "Draw", extra="plots")}
    assert Program("toy", "A toy.", tree).run(["draw"]) == 1
    error = capsys.readouterr().err
    assert re.search(
        r"run `pip install -c constraints.txt (-e )?'\.\[plots\]'` in the checkout", error
    )


def test_missing_package_of_the_store_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"list": CommandSpec(f"{__name__}:LISTING", "List")}
    program = Program("toy", "A toy.", tree, store_finder="no_such_package.module:find")
    assert program.run(["list", "--store", "x"]) == 0
    assert program.run(["list"]) == 1
    assert "`no_such_package` is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("installed", "extras", "advised"),
    [
        ({}, "build,cpu", "build,cpu"),
        ({"onnxruntime-gpu": "1.31.1"}, "build,cpu", "gpu-build"),
        ({"onnxruntime-gpu": "1.31.1"}, "bench,build,cpu", "bench,gpu-build"),
        ({"onnxruntime-gpu": "1.31.1"}, "plots", "plots"),
    ],
)
def test_advice_never_adds_packages_for_the_cpu_to_those_for_cuda(
    installed: dict[str, str], extras: str, advised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.host.machine.installed_versions", lambda _: installed)
    assert f"'.[{advised}]'" in advise_install(extras)


@pytest.mark.parametrize(
    ("origin", "options"),
    [
        ('{"url": "file:///checkout", "dir_info": {"editable": true}}', "-c constraints.txt -e"),
        ('{"url": "file:///checkout", "dir_info": {}}', "-c constraints.txt"),
        (None, "-c constraints.txt"),
    ],
)
def test_advice_keeps_an_editable_installation(
    origin: str | None, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda _: Mock(read_text=lambda _: origin))
    assert advise_install("plots") == f"run `pip install {options} '.[plots]'` in the checkout"


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from hundredfold.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('ray', 'numpy', 'torch', 'onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_the_subcommands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "verify" in script
    assert "--search-seconds" in script


def test_completion_needs_no_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command whose extra is not installed is completed without its options."""

    def load(spec: CommandSpec) -> Command:
        if spec.extra:
            raise ModuleNotFoundError(name="playwright")
        return load_command(spec)

    load_command = CommandSpec.load
    monkeypatch.setattr(CommandSpec, "load", load)
    assert main(["completion", "bash"]) == 0
    assert "verify" in capsys.readouterr().out


COMPLETION = (sys.executable, "-m", "hundredfold", "completion", "bash")


def test_reader_that_has_gone_gets_no_traceback() -> None:
    with subprocess.Popen(COMPLETION, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 1


def test_full_disk_behind_stdout_is_named_once() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(COMPLETION, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"error: cannot write: No space left on device\n"
