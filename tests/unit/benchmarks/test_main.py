from __future__ import annotations

from benchmarks.__main__ import COMMANDS


def test_command_is_in_the_folder_of_its_name() -> None:
    for name, command in COMMANDS.items():
        assert command.target == f"benchmarks.{name.replace('-', '_')}.command"
