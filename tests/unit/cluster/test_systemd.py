"""Static check of the shipped systemd unit, without a running systemd."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cluster
from cluster.launcher import command as serve
from cluster.launcher.local_environment import has_own_ray_directory, ray_temp_environment
from deployments.terminal.command_line import UNUSABLE_CONFIG

UNIT = Path(cluster.__file__).parent / "systemd" / "hundredfold.service"
OPERATIONS = Path(cluster.__file__).parents[1] / "docs" / "operations.md"
BINARY = "/opt/hundredfold/bin/hundredfold"


def read_drop_in() -> str:
    """Return the file with the options for production that the document writes."""
    _, _, rest = OPERATIONS.read_text().partition("production.conf <<'END'\n")
    return rest.partition("END\n")[0]


def test_commands_that_would_fail_again_are_not_repeated() -> None:
    assert f"\nRestartPreventExitStatus=2 {UNUSABLE_CONFIG}\n" in UNIT.read_text()


def test_lack_of_memory_and_failed_starts_do_not_end_the_service() -> None:
    unit, service = UNIT.read_text().split("\n[Service]\n")
    assert "\nStartLimitIntervalSec=0\n" in unit
    assert "\nRestart=always\n" in service
    assert "\nOOMPolicy=continue\n" in service


def test_documented_commands_install_nothing_into_the_environment_that_serves() -> None:
    """A running server starts processes from its environment."""
    text = OPERATIONS.read_text()
    environment = BINARY.removesuffix("/bin/hundredfold")
    assert f"ln -sfn hundredfold-2 {environment} " in text
    assert f"-m venv {environment}\n" not in text
    assert f"{environment}/bin/pip" not in text


def test_gpu_has_its_device_files_before_the_server_looks_for_it() -> None:
    text = UNIT.read_text()
    assert re.search(r"^After=.*\bnvidia-persistenced\.service$", text, re.MULTILINE)
    assert "\nExecStartPre=+-/usr/bin/nvidia-modprobe -u -c 0\n" in text


def test_logs_of_replicas_outlive_the_private_tmp_of_the_service() -> None:
    settings = [line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line]
    assert ["LogsDirectory", "hundredfold"] in settings
    assert ["LogsDirectoryMode", "0700"] in settings
    # systemd creates the directory of LogsDirectory below /var/log, and names it in this variable.
    service = {"RAY_TMPDIR": "/var/log/hundredfold", "LOGS_DIRECTORY": "/var/log/hundredfold"}
    assert ["Environment", f"RAY_TMPDIR={service['RAY_TMPDIR']}"] in settings
    assert ray_temp_environment(service) == {"RAY_TMPDIR": service["RAY_TMPDIR"]}
    assert has_own_ray_directory(service)


def test_drop_in_replaces_the_command_by_one_that_serve_accepts() -> None:
    section, reset, command = read_drop_in().replace("\\\n", "").strip().split("\n")
    assert (section, reset) == ("[Service]", "ExecStart=")
    binary, name, *words = shlex.split(command.removeprefix("ExecStart="))
    assert (binary, name) == (BINARY, "serve")
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args(words)
    keys = "/var/lib/hundredfold/keys.json"
    assert str(arguments.keys) == keys
    assert f"keys add alice --expires 90d --file {keys}\n" in OPERATIONS.read_text()
    assert arguments.config == Path("/var/lib/hundredfold/serve_config.yaml")


def test_tokens_are_in_a_private_file_and_on_no_command_line() -> None:
    assert "\nEnvironmentFile=-/var/lib/hundredfold/environment\n" in UNIT.read_text()
    text = OPERATIONS.read_text()
    assert "-m 600 /dev/null environment" in text
    assert not re.search(r"^(export )?HF_TOKEN=|^export HUNDREDFOLD_KEY=", text, re.MULTILINE)


def test_upgrade_replaces_the_unit() -> None:
    _, _, upgrade = OPERATIONS.read_text().partition("\n## Upgrade\n")
    copied = upgrade.index("cp cluster/systemd/hundredfold.service /etc/systemd/system/")
    assert copied < upgrade.index("systemctl daemon-reload && systemctl restart hundredfold")


def test_processes_lack_rights_that_they_do_not_need() -> None:
    settings = UNIT.read_text().splitlines()
    for name in ("LockPersonality", "ProtectKernelLogs", "ProtectKernelModules"):
        assert f"{name}=yes" in settings
    assert "UMask=0077" in settings
    hides_gpus = re.compile(r"(ProtectClock|PrivateDevices|Device\w+)=")
    assert not any(hides_gpus.match(line) for line in settings)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert BINARY in text
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(BINARY, sys.executable))
    drop_in = tmp_path / f"{UNIT.name}.d" / "production.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(read_drop_in().replace(BINARY, sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
