"""The wheel: what it contains, and that its commands find their config from any directory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory], REPOSITORY)
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An environment with the wheel and the dependencies of this one, but not this checkout."""
    directory = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", directory], REPOSITORY)
    # Python adds the paths of .pth files, but does not read .pth files in those paths: the
    # editable installation of the checkout stays out.
    dependencies = Path(pytest.__file__).parents[1]
    (directory / SITE_PACKAGES / "dependencies.pth").write_text(f"{dependencies}\n")
    into = ["--python", directory / "bin/python", "install", "--no-deps", "--no-index", wheel]
    run([sys.executable, "-m", "pip", *into], REPOSITORY)
    return directory


def run(command: list[str | Path], directory: Path) -> None:
    subprocess.run(command, cwd=directory, check=True, capture_output=True)


def call_installed(
    installed: Path, directory: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(installed / "bin/hundredfold"), *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


def test_wheel_contains_every_tracked_file_of_the_packages(wheel: Path) -> None:
    packages = ("hundredfold", "deployments", "build_artifacts", "cluster", "benchmarks")
    listing = subprocess.run(
        ["git", "ls-files", *packages], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    contents = set(zipfile.ZipFile(wheel).namelist())
    assert set(listing.stdout.split()) <= contents
    assert not [name for name in contents if name.startswith("tests/")]


def test_wrapper_of_haproxy_is_executable(wheel: Path) -> None:
    mode = zipfile.ZipFile(wheel).getinfo("cluster/edge/haproxy-wrapper.sh").external_attr >> 16
    assert mode & 0o111 == 0o111


def test_wheel_contains_the_serve_config_and_the_licenses(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    expected = (REPOSITORY / "serve_config.yaml").read_bytes()
    assert archive.read("cluster/serve_config.yaml") == expected
    licenses = {Path(name).name for name in archive.namelist() if "/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE"}


def test_check_without_a_config_reads_the_installed_one(installed: Path, tmp_path: Path) -> None:
    checked = call_installed(installed, tmp_path, "check")
    shipped = installed / SITE_PACKAGES / "cluster/serve_config.yaml"
    assert (checked.returncode, checked.stdout) == (0, f"{shipped}: no problems\n"), checked.stderr


def test_config_of_the_working_directory_comes_first(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "serve_config.yaml").write_text("applications: 3\n")
    checked = call_installed(installed, tmp_path, "check")
    assert checked.returncode == 1
    assert checked.stdout.startswith("serve_config.yaml:1: applications")


def test_serve_without_a_config_reads_the_installed_one(installed: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        served = call_installed(installed, tmp_path, "serve", "--port", port)
    assert served.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in served.stderr, "the config was not read"
    assert [path.name for path in tmp_path.iterdir()] == [".run"], "logs go to the user's directory"
