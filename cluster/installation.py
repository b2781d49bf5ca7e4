"""Installer of the packages that fit this host, for the CPU or for CUDA.

`make` runs this module with the Python of a new, empty environment, into which the module installs
packages. The module therefore imports only the standard library, and modules of this project that
import nothing else.
`onnxruntime` and `onnxruntime-gpu` have the same import name, as do `onnxruntime-genai` and
`onnxruntime-genai-cuda`. Packages for the CPU are therefore removed before those for CUDA are
installed, and vice versa.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata

from deployments.host.gpus import Gpu, find_visible, read_gpus
from deployments.host.machine import is_from_checkout

CPU_PACKAGES = ("onnxruntime", "onnxruntime-genai")
GPU_PACKAGES = ("onnxruntime-gpu", "onnxruntime-genai-cuda")
_PIP = ("-m", "pip", "--disable-pip-version-check")
# Advice for users. `make serve` installs packages only once. This command repairs the packages, or
# adapts them to a new driver.
REPAIR = f"run `{sys.executable} -m cluster.installation serve` in the checkout"
# Purpose of the environment -> extras of pyproject.toml (for the CPU, for CUDA).
_EXTRAS = {"serve": ("cpu,build", "gpu-build"), "dev": ("dev", "gpu-dev")}


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """Plan of an installation: packages to remove, packages to reinstall, extras to install."""

    extras: str
    reason: str  # such as "for the CPU: no NVIDIA GPU was found"
    remove: tuple[str, ...] = ()
    # Installed packages that share files with the removed packages.
    reinstall: tuple[str, ...] = ()
    is_editable: bool = True  # whether the environment imports the modules of the checkout

    def commands(self, python: str) -> list[list[str]]:
        """Return the command lines of pip in the order of execution."""
        pip = [python, *_PIP]
        install = [*pip, "install", "--progress-bar", "on", "-c", "constraints.txt"]
        commands = [[*pip, "uninstall", "--yes", *self.remove]] if self.remove else []
        if self.reinstall:
            commands.append([*install, "--force-reinstall", "--no-deps", *self.reinstall])
        mode = ["-e"] if self.is_editable else []
        return [*commands, [*install, *mode, f".[{self.extras}]"]]


def plan_install(
    gpus: Sequence[Gpu],
    installed: Collection[str],
    *,
    purpose: str,
    allow_gpu: bool = True,
    is_editable: bool = True,
) -> InstallPlan:
    """Plan an installation for the CPU or CUDA. `installed` holds names of packages."""
    visible = find_visible(gpus)
    no_gpu = why_no_gpu(gpus, visible, allow_gpu=allow_gpu)
    for_cpu, for_gpu = _EXTRAS[purpose]
    if no_gpu is None:
        extras, required, excluded = for_gpu, GPU_PACKAGES, CPU_PACKAGES
        reason = f"for {visible[0].name}, driver {visible[0].driver or 'unknown'}"
    else:
        extras, required, excluded = for_cpu, CPU_PACKAGES, GPU_PACKAGES
        reason = f"for the CPU: {no_gpu}"
    remove = tuple(name for name in excluded if name in installed)
    reinstall = tuple(name for name in required if remove and name in installed)
    return InstallPlan(extras, reason, remove, reinstall, is_editable)


def why_no_gpu(
    gpus: Sequence[Gpu], visible: Sequence[Gpu], *, allow_gpu: bool = True
) -> str | None:
    """Return why CUDA packages would be useless; None if the first visible GPU can run them.

    `visible` are those of the host's `gpus` that CUDA shows. Engines and builds use the first one.
    """
    if not gpus:
        return "no NVIDIA GPU was found"
    if not allow_gpu:
        return f"{gpus[0].name} is left out on request"
    if not visible:
        return f"CUDA_VISIBLE_DEVICES hides {gpus[0].name}"
    return visible[0].problem


def is_editable(distributions: Iterable[metadata.Distribution]) -> bool:
    """Return whether the environment imports the checkout's modules; True if it has no modules.

    The environment of a service has its own copy of the modules. The installation must keep this
    copy: otherwise the service would run the checkout of the administrator who repairs packages.
    """
    for distribution in distributions:
        if _read_name(distribution) == "hundredfold":
            return is_from_checkout(distribution)
    return True


def _read_name(distribution: metadata.Distribution) -> str:
    """Return the name in lower case; empty if pip was killed before it wrote the metadata."""
    found = distribution.metadata
    return found["Name"].lower() if "Name" in found else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Install packages. Return the exit code of the first pip command that fails, else 0."""
    parser = argparse.ArgumentParser(prog="python -m cluster.installation", description=__doc__)
    parser.add_argument("purpose", choices=sorted(_EXTRAS))
    parser.add_argument("--no-gpu", action="store_true", help="install for the CPU in any case")
    parser.add_argument("--dry-run", action="store_true", help="print the commands of pip only")
    arguments = parser.parse_args(argv)
    found = list(metadata.distributions())
    plan = plan_install(
        read_gpus(),
        set(map(_read_name, found)),
        purpose=arguments.purpose,
        allow_gpu=not arguments.no_gpu,
        is_editable=is_editable(found),
    )
    print(f"installing {plan.reason}", flush=True)
    for command in plan.commands(sys.executable):
        print(" ".join(command[1:]), flush=True)
        code = 0 if arguments.dry_run else subprocess.run(command, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
