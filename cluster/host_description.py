"""Reader of the facts about this host that `hundredfold doctor` diagnoses."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil

from cluster.diagnosis import HostDescription, StoreDescription
from cluster.linting.document import UnreadableConfig, read_document
from cluster.processes import PORTS, describe_port_owner, end_with_parent, is_port_free
from cluster.serve_config import read_args, read_mapping
from deployments.artifacts.store import list_model_directories
from deployments.config import default_store, expand_home
from deployments.gpus import find_visible, read_gpus, read_visible_gpus
from deployments.idle_cores import LATENCY_DEVICE, halts_idle_cores
from deployments.machine import (
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
_DEFAULT_HTTP_PORT = 8000
_ANY_IPV4, _ANY_IPV6 = "0.0.0.0", "::"
# Default inner ports of `hundredfold serve` to check: dashboard, metrics, HAProxy's statistics.
_INNER_PORTS = (8265, 9101, 8404)
_SHARED_MEMORY = Path("/dev/shm")


def read_host_description(config: Path, store: Path | None = None) -> HostDescription:
    """Describe this host for the Serve config `config`. `store` replaces the config's store."""
    document = _read_config(config)
    http_port = _find_http_port(document)
    http_addresses = [(host, http_port) for host in _find_http_hosts(document)]
    addresses = [*http_addresses, *((_ANY_IPV4, port) for port in _INNER_PORTS)]
    gpus, memory = read_gpus(), psutil.virtual_memory()
    limit = ControlGroups.own().free_bytes()
    return HostDescription(
        cpu=read_cpu_info(),
        cores=usable_cores(),
        memory_bytes=memory.total,
        free_bytes=memory.available if limit is None else min(limit, memory.available),
        gpus=gpus,
        visible_gpus=find_visible(gpus),
        knows_gpu_memory=bool(read_visible_gpus()),
        gpu_memory_in_bytes=_has_gpu_memory_in_bytes(document),
        python=platform.python_version(),
        packages=installed_versions(PACKAGES),
        store=_describe_store(store or _find_store(document)),
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


def _read_config(path: Path) -> Any:
    """Read the config. Return None if it cannot be read; `hundredfold check` reports this error."""
    try:
        return read_document(path.read_text(encoding="utf-8")).value
    except (OSError, UnicodeDecodeError, UnreadableConfig):
        return None


def _find_http_port(document: Any) -> int:
    port = read_mapping(document, "http_options").get("port")
    return port if isinstance(port, int) and port in PORTS else _DEFAULT_HTTP_PORT


def _find_http_hosts(document: Any) -> tuple[str, ...]:
    """Return the config's host if it is an IP address, else the addresses of all interfaces."""
    host = str(read_mapping(document, "http_options").get("host"))
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _ANY_IPV4, _ANY_IPV6
    return (host,)


def _find_store(document: Any) -> Path:
    for args in read_args(document):
        if isinstance(store := args.get("store"), str):
            return expand_home(store)
    return default_store()


def _has_gpu_memory_in_bytes(document: Any) -> bool:
    budgets = (args.get("gpu_memory") for args in read_args(document))
    return any(isinstance(budget, int | float) and budget > 1 for budget in budgets)


def _describe_store(path: Path) -> StoreDescription:
    nearest = next(
        p for p in (path, *path.absolute().parents) if os.access(p, os.F_OK, effective_ids=True)
    )
    return StoreDescription(
        path=str(path),
        models=_count_models(path),
        is_writable=os.access(nearest, os.W_OK),
        free_bytes=_free_bytes(nearest),
    )


def _count_models(store: Path) -> int:
    try:
        return len(list_model_directories(store))
    except OSError:  # a store that cannot be read has nothing to serve
        return 0


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
