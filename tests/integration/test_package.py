"""Wheel and sdist: their contents, and commands and a server that run from the installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.artifacts import WIDTH, seal_tiny
from tests.support.ports import free_port
from tests.support.waiting import wait_for

REPOSITORY = Path(__file__).parents[2]
SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"

CONFIGURED_MODEL = "sentence-transformers/all-MiniLM-L6-v2"  # configured in serve_config.yaml


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist."""
    directory = tmp_path_factory.mktemp("built")
    run([sys.executable, "-m", "hatchling", "build", "-d", directory], REPOSITORY)
    return directory


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A virtual environment with the wheel and this environment's dependencies.

    It cannot import this checkout.
    """
    directory = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", directory], REPOSITORY)
    # Python adds the directory named in a .pth file to sys.path, but reads no .pth files of that
    # directory. So the .pth file of the editable installation adds no path to this checkout.
    dependencies = Path(pytest.__file__).parents[1]
    (directory / SITE_PACKAGES / "dependencies.pth").write_text(f"{dependencies}\n")
    into = ["--python", directory / "bin/python", "install", "--no-deps", "--no-index", wheel]
    run([sys.executable, "-m", "pip", *into], REPOSITORY)
    for name, module in (("ray", "ray.scripts.scripts"), ("serve", "ray.serve.scripts")):
        script = directory / "bin" / name  # the original script starts the tests' Python
        call = "main" if name == "ray" else "cli"
        script.write_text(f"#!{directory}/bin/python\nfrom {module} import {call}\n{call}()\n")
        script.chmod(0o755)
    return directory


def run(command: list[str | Path], directory: Path) -> None:
    subprocess.run(command, cwd=directory, check=True, capture_output=True)


def environment() -> dict[str, str]:
    """Return the environment variables of this process without PYTHONPATH."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def call_installed(
    installed: Path, directory: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [str(installed / "bin/hundredfold"), *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True, check=False
    )


def test_wheel_contains_every_tracked_file_of_the_packages(wheel: Path) -> None:
    packages = ("hundredfold", "deployments", "build_artifacts", "cluster", "benchmarks")
    listing = subprocess.run(
        ["git", "ls-files", *packages], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    contents = set(zipfile.ZipFile(wheel).namelist())
    assert set(listing.stdout.split()) <= contents
    assert not [name for name in contents if name.startswith("tests/")]


def test_sdist_builds_the_same_wheel(built: Path, wheel: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], source)
    (again,) = (source / "dist").glob("*.whl")
    assert read_checksums(again) == read_checksums(wheel)


def read_checksums(wheel: Path) -> dict[str, int]:
    return {info.filename: info.CRC for info in zipfile.ZipFile(wheel).infolist()}


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


@pytest.mark.ray
@pytest.mark.slow
def test_serve_without_a_config_answers_with_the_installed_one(
    installed: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    store, output = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("log") / "serve.log"
    seal_tiny(store, CONFIGURED_MODEL)
    port = free_port()
    with output.open("wb") as log:
        server = subprocess.Popen(
            [installed / "bin/hundredfold", "serve", "--no-gpu", "--port", str(port)],
            cwd=tmp_path,
            env=environment() | {"HUNDREDFOLD_STORE": str(store)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: "serving on" in output.read_text() or server.poll() is not None, 600)
        url = f"http://127.0.0.1:{port}/models/{CONFIGURED_MODEL}"
        response = httpx.post(url, json={"inputs": "a text"}, timeout=60)
    finally:
        server.terminate()
        assert server.wait(60) == 0, output.read_text()
    assert response.status_code == 200, response.text
    assert np.shape(response.json()) == (1, WIDTH)
    shipped = installed / SITE_PACKAGES / "cluster/serve_config.yaml"
    assert f"checking {shipped}" in output.read_text()
    assert [path.name for path in tmp_path.iterdir()] == [".run"], "logs go to the user's directory"
