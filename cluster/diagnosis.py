"""Pure functions that turn the description of a host into findings, each with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from cluster.environment import OBJECT_STORE_BYTES
from cluster.gpu_support import assess_gpus
from cluster.installation import REPAIR
from deployments.host.gpus import Gpu
from deployments.host.machine import CpuInfo

Level: TypeAlias = Literal["ok", "note", "problem"]

_GIGABYTE = 1e9
MIN_STORE_BYTES = int(3 * _GIGABYTE)  # the demo models, and the largest workspace of their builds
MIN_OPEN_FILES = 8_500  # HAProxy: two for each of at most 4,096 connections, and some more
RAISE_OPEN_FILES = (
    "raise the hard limit: `ulimit -Hn 65536` as root, LimitNOFILE in the systemd unit, or "
    "`--ulimit nofile=65536` of the container"
)
REBUILD_PYTHON = (
    "`PYTHON_CONFIGURE_OPTS='--enable-optimizations --with-lto' pyenv install --force VERSION`"
)
_REQUIRED = ("ray", "onnxruntime", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory that a server takes with its config, including Ray."""

    minimum: int  # bytes of the replicas that always run, with the models of the config
    maximum: int  # bytes of all replicas that the cores permit, with full pools, and of the builder


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDescription:
    """The directory of sealed artifacts."""

    path: str  # or why there is none
    models: int  # number of models; 0 if the directory is missing or cannot be read
    offloaded_models: int = 0  # those of them whose KV caches are in main memory, beside a GPU
    is_writable: bool
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDescription:
    """Facts about a host and a Serve config, as input of `diagnose`."""

    config: Path
    config_error: str | None  # why the config cannot be read
    cpu: CpuInfo
    cores: int  # number of cores that this process may use
    memory_bytes: int
    free_bytes: int  # free memory of the host, or less if this process's control groups allow less
    needed: MemoryNeed | None  # None: the config has problems, or a package is missing
    gpus: tuple[Gpu, ...]
    visible_gpus: tuple[Gpu, ...]  # those that CUDA shows to this process, in the order of CUDA
    knows_gpu_memory: bool  # whether nvidia-smi lists the memory of these GPUs
    gpu_memory_in_bytes: bool  # whether `gpu_memory` of the config is in bytes, not a fraction
    python: str
    python_is_optimized: bool  # False: known to be compiled without profile-guided optimization
    packages: Mapping[str, str]  # name -> installed version
    store: StoreDescription
    ports: Mapping[int, str]  # port of `hundredfold serve` that is taken -> process
    http_port: int
    can_listen: bool  # whether this user may listen on `http_port`
    open_files: int  # hard limit of open file descriptors, to which HAProxy raises the soft limit
    shared_bytes: int  # free bytes in /dev/shm
    can_keep_cores_awake: bool | None  # None: the host does not halt idle cores
    schedules_sessions: bool  # whether each process session gets an equal share of the cores
    has_setpriv: bool  # of util-linux 2.33 or later, which can end a child with its parent


@dataclass(frozen=True, slots=True)
class Finding:
    """One item of the diagnosis. `action` is empty if there is nothing to do."""

    name: str
    level: Level
    found: str
    meaning: str
    action: str = ""


def diagnose(host: HostDescription) -> list[Finding]:
    """Return the findings in the order of the output."""
    return [check(host) for check in _CHECKS]


def _check_config(host: HostDescription) -> Finding:
    found = str(host.config)
    if host.config_error:
        return Finding(
            "config", "problem", found,
            f"it cannot be read: {host.config_error}",
            "correct it, or name another file: `hundredfold doctor FILE`",
        )  # fmt: skip
    if host.needed is None:
        return Finding(
            "config", "note", found,
            "it has problems, or a package is missing",
            f"run `hundredfold check {host.config}`",
        )  # fmt: skip
    return Finding("config", "ok", found, "`hundredfold check` finds no problems")


def _check_processor(host: HostDescription) -> Finding:
    cpu, flags = host.cpu, set(host.cpu.flags)
    found = f"{cpu.name}, {host.cores} cores, {', '.join(cpu.flags) or 'no int8 units'}"
    if host.cores < 2:
        return Finding(
            "processor", "problem", found,
            "one core: HTTP, tokenizer and engine take turns, latencies multiply",
            "give the machine or container two cores or more",
        )  # fmt: skip
    if "amx_int8" in flags:
        return Finding("processor", "ok", found, "int8 by matrix units (AMX) and VNNI")
    if {"avx512_vnni", "avx_vnni", "i8mm", "asimddp"} & flags:
        return Finding("processor", "ok", found, "int8 by dot-product units: the graphs are fast")
    if cpu.int8_overflows:
        return Finding(
            "processor", "note", found,
            "no VNNI: int8 takes a slower path that avoids overflow, gains over fp32 are small",
            "prefer x86 with VNNI (Ice Lake, Zen 4 and later) or arm64 with dot products",
        )  # fmt: skip
    return Finding("processor", "note", found, "unknown int8 units: measure with `bench engine`")


def _check_memory(host: HostDescription) -> Finding:
    found = f"{_gigabytes(host.free_bytes)} free of {_gigabytes(host.memory_bytes)}"
    if host.needed is None:
        return Finding(
            "memory", "note", found,
            "its need is unknown: see the config",
        )  # fmt: skip
    minimum, maximum = _gigabytes(host.needed.minimum), _gigabytes(host.needed.maximum)
    if host.free_bytes < host.needed.minimum:
        return Finding(
            "memory", "problem", found,
            f"Ray, replicas and models of the config need about {minimum}",
            "free memory, raise the limit of the container, or serve fewer models",
        )  # fmt: skip
    if host.free_bytes < host.needed.maximum:
        return Finding(
            "memory", "note", found,
            f"enough to start ({minimum}); replicas with full pools and builds may take {maximum}",
            "where the store has many models, lower `pool_bytes` or `max_replicas`",
        )  # fmt: skip
    return Finding(
        "memory", "ok", found,
        f"enough for replicas with full pools and builds, which take {maximum}",
    )  # fmt: skip


def _check_gpu(host: HostDescription) -> Finding:
    support = assess_gpus(host.gpus, host.packages, host.visible_gpus)
    found = support.describe()
    if support.problem is not None:
        meaning = "Ray gets none: requests for a GPU are answered by the CPU"
        if not host.gpus:
            level: Level = "note" if support.repair else "ok"
            return Finding("GPU", level, found, meaning, support.repair)
        action = support.repair
        if action != REPAIR:
            action += (
                "; or leave the GPU out: `make serve NO_GPU=1` or `hundredfold serve --no-gpu`"
            )
        return Finding("GPU", "problem", found, meaning, action)
    meaning = f"Ray gets {support.usable}; FP16 candidates run on `options.use_gpu: true`"
    if support.repair:
        return Finding("GPU", "note", found, meaning, support.repair)
    if not (host.knows_gpu_memory or host.gpu_memory_in_bytes):
        return Finding(
            "GPU", "note", found,
            f"{meaning}; its memory is unknown, so that a fraction as `gpu_memory` bounds nothing",
            "set `gpu_memory` of the config in bytes",
        )  # fmt: skip
    return Finding("GPU", "ok", found, meaning)


def _check_packages(host: HostDescription) -> Finding:
    packages = host.packages
    found = f"Python {host.python}, " + ", ".join(
        f"{name} {version}" for name, version in packages.items()
    )
    if {"onnxruntime", "onnxruntime-gpu"} <= packages.keys():
        return Finding(
            "packages", "problem", found,
            "`onnxruntime` and `onnxruntime-gpu` overwrite each other's files",
            REPAIR,
        )  # fmt: skip
    provided = {"onnxruntime"} if "onnxruntime-gpu" in packages else set()
    if missing := [name for name in _REQUIRED if name not in {*packages, *provided}]:
        return Finding("packages", "problem", found, f"serving needs {', '.join(missing)}", REPAIR)
    if "torch" not in packages:
        extra = "gpu-build" if "onnxruntime-gpu" in packages else "build"
        return Finding(
            "packages", "note", found,
            "this environment serves; it cannot build models",
            f"install `.[{extra}]` to build",
        )  # fmt: skip
    if not host.python_is_optimized:
        return Finding(
            "packages", "note", found,
            "pyenv has compiled this Python without optimization: a seventh fewer requests/s",
            f"{REBUILD_PYTHON}; or use the Python of the distribution. Then create `.venv` again",
        )  # fmt: skip
    return Finding("packages", "ok", found, "this environment builds and serves")


def _check_store(host: HostDescription) -> Finding:
    store = host.store
    found = f"{store.path}, {store.models} models, {_gigabytes(store.free_bytes)} free"
    if not store.models:
        return _check_empty_store(store, found)
    if not store.is_writable:
        return Finding(
            "store", "note", found, "read-only: replicas serve, and neither tune nor build"
        )
    if store.free_bytes < MIN_STORE_BYTES:
        return Finding(
            "store", "problem", found,
            f"builds need up to {_gigabytes(MIN_STORE_BYTES)}",
            "remove old versions with `hundredfold models gc`",
        )  # fmt: skip
    return Finding("store", "ok", found, "models are served, built and tuned here")


def _check_empty_store(store: StoreDescription, found: str) -> Finding:
    if not store.is_writable:
        return Finding(
            "store", "problem", found, "there is nothing to serve, and this user cannot build here",
            "give the directory to this user, or name another with $HUNDREDFOLD_STORE",
        )  # fmt: skip
    if store.free_bytes < MIN_STORE_BYTES:
        return Finding(
            "store", "problem", found,
            f"there is nothing to serve, and builds need up to {_gigabytes(MIN_STORE_BYTES)}",
            "free space, or name another directory with $HUNDREDFOLD_STORE",
        )  # fmt: skip
    return Finding(
        "store", "note", found, "there is nothing to serve yet",
        "run `hundredfold demo` or `hundredfold build MODEL`",
    )  # fmt: skip


def _check_ports(host: HostDescription) -> Finding:
    taken = [f"{port} ({owner})" for port, owner in host.ports.items()]
    found = f"HTTP {host.http_port}; taken: {', '.join(taken) or 'none'}"
    if not host.can_listen:
        return Finding(
            "ports", "note", found,
            f"this user may not listen on port {host.http_port}",
            "serve on a port from 1024, or permit lower ones: `AmbientCapabilities="
            "CAP_NET_BIND_SERVICE` in the systemd unit, or run as root",
        )  # fmt: skip
    if host.http_port in host.ports:
        return Finding(
            "ports", "note", found,
            "another server, or this one, has the port for clients",
            f"stop it, or serve on another port: `make serve PORT={host.http_port + 1}`",
        )  # fmt: skip
    return Finding("ports", "ok", found, "inner ports that are taken are replaced by free ones")


def _check_limits(host: HostDescription) -> Finding:
    found = f"{host.open_files} open files, {_gigabytes(host.shared_bytes)} in /dev/shm" + (
        "" if host.has_setpriv else ", no setpriv that knows --pdeathsig"
    )
    if host.open_files < MIN_OPEN_FILES:
        return Finding(
            "limits", "problem", found,
            f"HAProxy needs about {MIN_OPEN_FILES}, two per connection, or does not start",
            RAISE_OPEN_FILES,
        )  # fmt: skip
    if host.shared_bytes < OBJECT_STORE_BYTES:
        return Finding(
            "limits", "note", found,
            "Ray's object store falls back to the disk; messages here do not pass through it",
            "start the container with `--shm-size=512m`",
        )  # fmt: skip
    if not host.has_setpriv:
        return Finding(
            "limits", "note", found,
            "if the launcher is killed, its processes live until the next start",
            "install util-linux 2.33 or later",
        )  # fmt: skip
    return Finding("limits", "ok", found, "enough for 1,000 connections")


def _check_wake_ups(host: HostDescription) -> Finding:
    if host.can_keep_cores_awake is None:
        return Finding("wake-ups", "ok", "not needed", "idle cores wake without a hypervisor")
    if host.can_keep_cores_awake:
        return Finding(
            "wake-ups", "ok", "/dev/cpu_dma_latency", "idle cores are kept awake during requests"
        )
    return Finding(
        "wake-ups", "note", "/dev/cpu_dma_latency cannot be written",
        "a lone request in this virtual machine takes about twice as long",
        "run as root, or allow the group of the server to write it by a udev rule",
    )  # fmt: skip


def _check_sessions(host: HostDescription) -> Finding:
    if not host.schedules_sessions:
        return Finding(
            "sessions", "ok", "not scheduled as groups", "other programs take no fixed share"
        )
    return Finding(
        "sessions", "note", "each session gets an equal share of the cores",
        "one busy shell, backup or load generator takes half of the cores from the server",
        "on a dedicated host: `sysctl kernel.sched_autogroup_enabled=0`, then restart the server",
    )  # fmt: skip


def _gigabytes(size: int) -> str:
    return f"{size / _GIGABYTE:.1f} GB"


_CHECKS: tuple[Callable[[HostDescription], Finding], ...] = (
    _check_config,
    _check_processor,
    _check_memory,
    _check_gpu,
    _check_packages,
    _check_store,
    _check_ports,
    _check_limits,
    _check_wake_ups,
    _check_sessions,
)
