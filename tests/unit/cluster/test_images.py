"""The text of the Dockerfiles meets the requirements of cluster and host. No image is built."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from cluster.__main__ import COMMANDS
from cluster.kuberay.pods import USER_ID
from deployments.terminal.command_line import CommandGroup

REPOSITORY = Path(__file__).parents[3]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
POD_IMAGES = ("cpu", "gpu")
IMAGES = (*POD_IMAGES, "host")


def read_dockerfile(image: str) -> list[str]:
    """Return the instructions without comments. Continued lines are joined."""
    text = (REPOSITORY / f"cluster/images/Dockerfile.{image}").read_text()
    included = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [line for line in included.replace("\\\n", " ").splitlines() if line.strip()]


def find_arguments(image: str, instruction: str) -> list[str]:
    return [
        line.removeprefix(instruction).strip()
        for line in read_dockerfile(image)
        if line.startswith(instruction + " ")
    ]


def read_final_stage(image: str) -> str:
    lines = read_dockerfile(image)
    last = max(n for n, line in enumerate(lines) if line.startswith("FROM "))
    return "\n".join(lines[last:])


@pytest.mark.parametrize("image", IMAGES)
def test_base_images_are_pinned(image: str) -> None:
    bases = [base.split()[0] for base in find_arguments(image, "FROM")]
    assert len(bases) == 2, "one image builds, the other one runs"
    for base in bases:
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[a-z0-9.-]+", base), base


def test_images_have_the_python_of_the_project() -> None:
    builders = [find_arguments(image, "FROM")[0] for image in IMAGES]
    assert set(builders) == {"python:3.11.14-slim-bookworm AS build"}
    assert PROJECT["requires-python"].startswith(">=3.11,")


@pytest.mark.parametrize("image", POD_IMAGES)
def test_image_of_pods_installs_its_extra_without_torch(image: str) -> None:
    (install,) = (run for run in find_arguments(image, "RUN") if "pip install" in run)
    extras = dict(assignment.split("=") for assignment in find_arguments(image, "ARG"))
    (installed,) = re.findall(r"\.\[(.*?)\]", install)
    installed_extra = installed.removesuffix(",tracing")
    assert installed_extra != installed
    assert installed_extra == image or (installed_extra, extras["EXTRAS"]) == ("${EXTRAS}", image)
    optional = PROJECT["optional-dependencies"]
    allowed = [*PROJECT["dependencies"], *optional[image], *optional["tracing"]]
    assert not any(re.match(r"torch|transformers", package) for package in allowed)
    assert not re.search(r"\btorch\b|\btransformers\b", "\n".join(read_dockerfile(image)))


def test_cuda_base_fits_the_pinned_onnxruntime() -> None:
    # A new onnxruntime-gpu may need another CUDA version, which its wheel names. Change both pins.
    assert "onnxruntime-gpu==1.31.1" in (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert find_arguments("gpu", "FROM")[-1].startswith("nvidia/cuda:13.0.")
    assert "-cudnn-runtime-" in find_arguments("gpu", "FROM")[-1]


@pytest.mark.parametrize("image", IMAGES)
def test_image_runs_as_the_user_of_the_pods(image: str) -> None:
    assert find_arguments(image, "USER") == [f"{USER_ID}:{USER_ID}"]
    assert f"useradd --uid {USER_ID} --gid {USER_ID}" in read_final_stage(image)


@pytest.mark.parametrize("image", POD_IMAGES)
def test_image_has_the_programs_of_kuberay_and_the_probes(image: str) -> None:
    (packages,) = (run for run in find_arguments(image, "RUN") if "apt-get install" in run)
    assert {"bash", "tini", "util-linux", "wget"} <= set(packages.split())
    assert find_arguments(image, "ENTRYPOINT") == ['["/usr/bin/tini", "--"]']


def test_gpu_image_has_the_headers_of_python_and_takes_a_compiler() -> None:
    """torch.compile builds C code, which requires a compiler and the headers of Python.

    The image has torch only if EXTRAS name it, and a compiler only if PACKAGES name it.
    """
    assert 'PACKAGES=""' in find_arguments("gpu", "ARG")
    (packages,) = (run for run in find_arguments("gpu", "RUN") if "apt-get install" in run)
    assert "${PACKAGES}" in packages.split()
    # The image of Python has the headers below /usr/local.
    assert "--from=build /usr/local /usr/local" in find_arguments("gpu", "COPY")


def find_sources(image: str) -> set[str]:
    """Return what the image copies from the checkout."""
    copies = [copy for copy in find_arguments(image, "COPY") if not copy.startswith("--from")]
    return {source for copy in copies for source in copy.split()[:-1]}


def test_images_contain_only_what_they_run() -> None:
    documents = {"README.md", "LICENSE", "NOTICE"}
    project = {"pyproject.toml", "constraints.txt", "serve_config.yaml", *documents}
    serving = project | {"hundredfold", "deployments", "cluster"}
    assert all(find_sources(image) == serving for image in POD_IMAGES)
    assert find_sources("host") == serving | {"build_artifacts"}
    ignore = (REPOSITORY / ".dockerignore").read_text().splitlines()
    included = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore
    assert included == find_sources("host")


def test_image_of_a_host_installs_the_compiler_of_its_kind() -> None:
    extras = dict(assignment.split("=", 1) for assignment in find_arguments("host", "ARG"))
    assert extras["EXTRAS"] == "cpu,build"
    optional = PROJECT["optional-dependencies"]
    assert {"cpu", "build", "gpu-build", "tracing"} <= set(optional)
    assert "EXTRAS=gpu-build" in (REPOSITORY / "cluster/images/Dockerfile.host").read_text()


def test_image_of_a_host_serves_as_documented() -> None:
    """The store, the keys and the home of Ray's token are in the one documented volume."""
    (volume,) = find_arguments("host", "VOLUME")
    assert f"-v hundredfold:{volume} " in (REPOSITORY / "docs/operations.md").read_text()
    environment = " ".join(find_arguments("host", "ENV"))
    assert f"HUNDREDFOLD_STORE={volume}/store" in environment
    assert f"--home-dir {volume}" in read_final_stage("host")
    assert find_arguments("host", "WORKDIR")[-1] == volume
    (command,) = find_arguments("host", "CMD")
    entry_point = json.loads(find_arguments("host", "ENTRYPOINT")[0])
    assert entry_point[-1] == "hundredfold"
    assert json.loads(command)[0] in COMMANDS
    assert "--no-auth" not in command, "a published port needs keys unless the user says otherwise"


def test_images_have_the_commands_that_the_document_runs_in_their_pods() -> None:
    """The images lack the compiler. Its commands are missing from `hundredfold models` there."""
    document = (REPOSITORY / "docs/kubernetes.md").read_text()
    named = "|".join(re.findall(r"hundredfold models ([a-z|]+)", document)).split("|")
    assert {"migrate", "promote", "rm"} <= set(named)
    models = COMMANDS["models"]
    assert isinstance(models, CommandGroup)
    for name in named:
        assert name in models.commands
