"""The Dockerfiles say what the cluster relies on. No docker here: they are read, not built."""

import re
import tomllib
from pathlib import Path

import pytest

from cluster.kuberay.pods import USER_ID

REPOSITORY = Path(__file__).parents[3]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
IMAGES = ("cpu", "gpu")


def dockerfile(image: str) -> list[str]:
    """Its instructions: comments gone, continued lines joined."""
    text = (REPOSITORY / f"cluster/images/Dockerfile.{image}").read_text()
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [line for line in kept.replace("\\\n", " ").splitlines() if line.strip()]


def arguments(image: str, instruction: str) -> list[str]:
    return [
        line.removeprefix(instruction).strip()
        for line in dockerfile(image)
        if line.startswith(instruction + " ")
    ]


def final_stage(image: str) -> str:
    lines = dockerfile(image)
    last = max(n for n, line in enumerate(lines) if line.startswith("FROM "))
    return "\n".join(lines[last:])


@pytest.mark.parametrize("image", IMAGES)
def test_bases_are_pinned(image: str) -> None:
    for base in arguments(image, "FROM"):
        tag = base.split()[0].partition(":")[2]
        assert re.match(r"\d+\.\d+\.\d+-", tag), base


def test_both_images_run_the_python_that_the_project_asks_for() -> None:
    builders = [arguments(image, "FROM")[0] for image in IMAGES]
    assert builders[0] == builders[1] == "python:3.11.14-slim-bookworm AS build"
    assert PROJECT["requires-python"].startswith(">=3.11,")


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_installs_its_own_extra_and_nothing_that_trains(image: str) -> None:
    (install,) = (run for run in arguments(image, "RUN") if "pip install" in run)
    extras = dict(each.split("=") for each in arguments(image, "ARG"))
    (asked,) = re.findall(r"\.\[(.*?)\]", install)
    assert asked == image or (asked, extras["EXTRAS"]) == ("${EXTRAS}", image)
    allowed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][image]]
    assert not any(re.match(r"torch|transformers", package) for package in allowed)
    assert not re.search(r"\btorch\b|\btransformers\b", "\n".join(dockerfile(image)))


def test_the_cuda_base_is_what_the_pinned_onnxruntime_was_built_for() -> None:
    # Another onnxruntime-gpu may need another CUDA: read its wheel again, then change both.
    assert "onnxruntime-gpu==1.31.1" in (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert arguments("gpu", "FROM")[-1].startswith("nvidia/cuda:13.0.")
    assert "-cudnn-runtime-" in arguments("gpu", "FROM")[-1]


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_runs_as_the_user_of_the_pods(image: str) -> None:
    assert arguments(image, "USER") == [f"{USER_ID}:{USER_ID}"]
    assert f"useradd --uid {USER_ID} --gid {USER_ID}" in final_stage(image)


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_has_what_kuberay_and_the_probes_call(image: str) -> None:
    (packages,) = (run for run in arguments(image, "RUN") if "apt-get install" in run)
    assert {"bash", "tini", "util-linux", "wget"} <= set(packages.split())
    assert arguments(image, "ENTRYPOINT") == ['["/usr/bin/tini", "--"]']


@pytest.mark.parametrize("image", IMAGES)
def test_only_what_serves_is_copied(image: str) -> None:
    sources = [
        source
        for copy in arguments(image, "COPY")
        if not copy.startswith("--from")
        for source in copy.split()[:-1]
    ]
    project = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "NOTICE"}
    assert set(sources) == project | {"hundredfold", "deployments", "cluster"}
    ignore = (REPOSITORY / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore
    assert kept == set(sources)
