"""Reader of the facts about this host that `hundredfold doctor` diagnoses."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import shutil
import signal
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from cluster.config_entries import (
    find_applications,
    read_args,
    read_mapping,
    read_number,
)
from cluster.configured_store import find_first_store
from cluster.diagnosis import HostDescription, MemoryNeed, StoreDescription
from cluster.launcher.local_ports import DEFAULT_PORTS
from cluster.linting.document import UnreadableConfig, read_document
from cluster.ports import HTTP_PORT, PORTS, describe_port_owner, is_port_free
from cluster.processes import end_with_parent
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import find_artifact, list_model_directories, read_model_id
from deployments.config import CORES_PER_INGRESS
from deployments.errors import ArtifactError, BadSetting
from deployments.host.gpus import find_visible, read_gpus, read_visible_gpus
from deployments.host.idle_cores import LATENCY_DEVICE, halts_idle_cores
from deployments.host.machine import (
    ControlGroups,
    installed_versions,
    read_cpu_info,
    schedules_sessions,
    usable_cores,
)

PACKAGES = (
    "hundredfold", "ray", "onnxruntime", "onnxruntime-gpu", "onnxruntime-genai",
    "onnxruntime-genai-cuda", "tokenizers", "numpy", "torch", "transformers", "openvino",
    "bitsandbytes", "tensorrt-cu13-libs", "flash-attn",
)  # fmt: skip
_ANY_IPV4, _ANY_IPV6 = "0.0.0.0", "::"
_SHARED_MEMORY = Path("/dev/shm")
# Memory of a model that is loaded at the start, in all replicas. The demo models take 0.35 GB each.
_MODEL_BYTES = 350_000_000


def read_host_description(config: Path, store: Path | None = None) -> HostDescription:
    """Describe this host for the Serve config `config`. `store` replaces the config's store."""
    document, config_error = _read_config(config)
    http_port = _find_http_port(document)
    http_addresses = [(host, http_port) for host in _find_http_hosts(document)]
    addresses = [*http_addresses, *((_ANY_IPV4, port) for port in DEFAULT_PORTS.values())]
    gpus, memory = read_gpus(), psutil.virtual_memory()
    cores, visible = usable_cores(), find_visible(gpus)
    limit, described_store = ControlGroups.own().free_bytes(), _describe_store(store, document)
    return HostDescription(
        config=config,
        config_error=config_error,
        cpu=read_cpu_info(),
        cores=cores,
        memory_bytes=memory.total,
        free_bytes=memory.available if limit is None else min(limit, memory.available),
        needed=_measure_memory(
            config,
            document,
            cores,
            has_gpu=bool(visible),
            offloaded_models=described_store.offloaded_models,
        ),
        gpus=gpus,
        visible_gpus=visible,
        knows_gpu_memory=bool(read_visible_gpus()),
        gpu_memory_in_bytes=_has_gpu_memory_in_bytes(document),
        python=platform.python_version(),
        python_is_optimized=_is_python_optimized(),
        packages=installed_versions(PACKAGES),
        store=described_store,
        ports={
            port: describe_port_owner(port) for host, port in addresses if _is_taken(host, port)
        },
        http_port=http_port,
        can_listen=all(_can_listen(host, port) for host, port in http_addresses),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # HAProxy raises the soft limit
        shared_bytes=_free_bytes(_SHARED_MEMORY),
        can_keep_cores_awake=os.access(LATENCY_DEVICE, os.W_OK) if halts_idle_cores() else None,
        schedules_sessions=schedules_sessions(),
        has_setpriv=bool(end_with_parent(signal.SIGTERM)),
    )


def _read_config(path: Path) -> tuple[Any, str | None]:
    """Return the config, or why it cannot be read."""
    try:
        return read_document(path.read_text(encoding="utf-8")).value, None
    except OSError as exc:
        return None, exc.strerror or str(exc)
    except (UnicodeDecodeError, UnreadableConfig) as exc:
        return None, str(exc)


def _measure_memory(
    config: Path, document: Any, cores: int, *, has_gpu: bool, offloaded_models: int
) -> MemoryNeed | None:
    """Return the memory that the config needs. Without a GPU, its deployments have no replicas.

    Return None if `hundredfold check` finds problems in the config, or a package is missing.
    """
    try:
        from cluster.linting.linter import check_file
        from cluster.replica_resources import (
            RAY_BYTES,
            REPLICA_BYTES,
            measure_builder,
            measure_replicas,
        )
    except ModuleNotFoundError:  # doctor must name the missing package
        return None
    try:
        if check_file(config, is_deployed=False):
            return None
    except (OSError, UnicodeDecodeError):
        return None
    minimum = maximum = RAY_BYTES
    for application in find_applications(document):
        maximum += measure_builder(application)
        entries = {entry.name: entry for entry in application.deployments()}
        for demand, memory in measure_replicas(application, offloaded_models):
            if demand.gpus and not has_gpu:
                continue
            entry = entries[demand.name]
            autoscaling = read_mapping(entry.raw, "autoscaling_config")
            policy = read_mapping(read_mapping(autoscaling, "policy"), "policy_kwargs")
            each = read_number(policy, "cores_per_replica", {})
            fitting = demand.max_replicas if each is None else int(cores / each)
            fewest = demand.min_replicas
            replicas = min(demand.max_replicas, max(fitting, fewest, 1))
            if entry.is_ingress and "num_replicas" not in entry.raw:
                fewest = replicas = max(cores // CORES_PER_INGRESS, 1)
            minimum += fewest * REPLICA_BYTES
            maximum += replicas * memory
    models = sum(len(args.get("models") or ()) for args in read_args(document))
    minimum += models * _MODEL_BYTES
    return MemoryNeed(minimum, max(minimum, maximum))


def _find_http_port(document: Any) -> int:
    port = read_mapping(document, "http_options").get("port")
    return port if isinstance(port, int) and port in PORTS else HTTP_PORT


def _find_http_hosts(document: Any) -> tuple[str, ...]:
    """Return the config's host if it is an IP address, else the addresses of all interfaces."""
    host = str(read_mapping(document, "http_options").get("host"))
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _ANY_IPV4, _ANY_IPV6
    return (host,)


def _is_python_optimized() -> bool:
    """Return False if pyenv has compiled this Python with its default options.

    Others optimize, and not all of them, such as Debian, record it in CONFIG_ARGS.
    """
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return "pyenv" not in sys.base_prefix or "--enable-optimizations" in options


def _has_gpu_memory_in_bytes(document: Any) -> bool:
    budgets = (args.get("gpu_memory") for args in read_args(document))
    return any(isinstance(budget, int | float) and budget > 1 for budget in budgets)


def _describe_store(named: Path | None, document: Any) -> StoreDescription:
    try:
        path = named or find_first_store(document)
    except BadSetting as error:
        return StoreDescription(path=error.message, models=0, is_writable=False, free_bytes=0)
    nearest = next(
        p for p in (path, *path.absolute().parents) if os.access(p, os.F_OK, effective_ids=True)
    )
    return StoreDescription(
        path=str(path),
        models=_count_models(path),
        offloaded_models=_count_offloaded_models(path),
        is_writable=os.access(nearest, os.W_OK),
        free_bytes=_free_bytes(nearest),
    )


def _count_models(store: Path) -> int:
    try:
        return len(list_model_directories(store))
    except OSError:  # a store that cannot be read has nothing to serve
        return 0


def _count_offloaded_models(store: Path) -> int:
    """Count the models that were built with `--offload-kv-cache`."""
    count = 0
    with suppress(OSError):  # as in `_count_models`
        for directory in list_model_directories(store):
            with suppress(ArtifactError):  # `hundredfold models ls` says what is damaged
                manifest = ArtifactManifest.parse(find_artifact(store, read_model_id(directory)))
                count += any(candidate.options.kv_offload for candidate in manifest.candidates)
    return count


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free if directory.is_dir() else 0


def _is_taken(host: str, port: int) -> bool:
    try:
        return not is_port_free(host, port)
    except OSError:  # not permitted, not an address of this host, or IPv6 is off
        return False


def _can_listen(host: str, port: int) -> bool:
    """Return False if this process lacks the permission, which ports below 1024 usually require."""
    try:
        is_port_free(host, port)
    except OSError as exc:
        return not isinstance(exc, PermissionError)
    return True
