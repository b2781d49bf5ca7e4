"""Rules about single values that the schemas accept although no server becomes ready with them."""

from __future__ import annotations

import difflib
import ipaddress
import re
import socket
from collections.abc import Iterator
from math import isfinite
from typing import Any

from cluster.config_entries import (
    IMPORT_PATH,
    ApplicationEntry,
    KeyPath,
    find_applications,
    read_mapping,
)
from cluster.linting.schema import KeyFinding
from cluster.ports import PORTS
from deployments.artifacts.store import LATEST_NAME, VERSION, is_model_id
from deployments.artifacts.types import Device
from deployments.ingress.http.cors import WILDCARD

TLS_OPTIONS = ("ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs")
# Execution providers of all builds of ONNX Runtime. The check does not import ONNX Runtime, because
# the replicas may have another build than this host.
PROVIDERS = frozenset(
    f"{name}ExecutionProvider"
    for name in (
        *("ACL", "Azure", "CANN", "CPU", "CUDA", "CoreML", "Dml", "Dnnl", "Js", "MIGraphX"),
        *("Nnapi", "NvTensorRTRTX", "OpenVINO", "QNN", "Rknpu", "Tensorrt", "VSINPU", "VitisAI"),
        *("WebGpu", "WebNN", "Xnnpack"),
    )
)
_PROVIDER_BY_LOWER = {name.lower(): name for name in sorted(PROVIDERS)}
# Characters of paths in RFC 3986 without two kinds: `%`, because HAProxy compares paths without
# decoding them, and characters that have a meaning in HAProxy's configuration.
_ROUTE_PREFIX = re.compile(r"(/[A-Za-z0-9._~:@+=!-]+)+")
# Value of the header `Origin`. A browser sends scheme and host in lower case, without a path. It
# leaves out the default port, and converts non-ASCII letters of a host name to ASCII. For local
# files it sends `null`.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+|null")
_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")
_HOST_NAME = re.compile(r"\w([\w.-]*\w)?")
_DIGITS_AND_DOTS = re.compile(r"[0-9.]+")


def check_values(config: Any) -> Iterator[KeyFinding]:
    """Yield a finding per unusable value. The schema check reports values of wrong types."""
    for path, message in _find_infinite(config, (), frozenset()):
        if not _is_foreign_setting(config, path):
            yield path, message
    if config.get("applications") == []:
        yield ("applications",), f"is empty: name one with the `import_path` `{IMPORT_PATH}`"
    yield from _invalid_ports(config)
    yield from _invalid_host(config)
    yield from _unusable_http_options(config)
    for application in find_applications(config):
        yield from _invalid_route_prefix(application)
        if application.is_hundredfold:
            yield from _invalid_models(application)
            yield from _unusable_providers(application)
            yield from _invalid_origins(application)


def _find_infinite(value: Any, path: KeyPath, ancestors: frozenset[int]) -> Iterator[KeyFinding]:
    """Report `.inf` and `.nan`, which the schemas accept as numbers."""
    if isinstance(value, float) and not isfinite(value):
        yield path, f"{value} is not a finite number: name a number"
    elif isinstance(value, dict | list) and id(value) not in ancestors:  # YAML data may be cyclic
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            part = key if isinstance(value, list) else str(key)
            yield from _find_infinite(item, (*path, part), ancestors | {id(value)})


def _is_foreign_setting(config: Any, path: KeyPath) -> bool:
    """Return whether `path` is an argument or a `user_config` of another project's application."""
    return any(key in ("args", "user_config") for key in path) and any(
        path[: len(application.path)] == application.path
        for application in find_applications(config)
        if not application.is_hundredfold
    )


def _is_origin(text: str) -> bool:
    return bool(_ORIGIN.fullmatch(text)) and not _DEFAULT_PORT.fullmatch(text)


def _invalid_ports(config: Any) -> Iterator[KeyFinding]:
    """Check the range of the ports, which Serve does not validate."""
    for options in ("http_options", "grpc_options"):
        port = read_mapping(config, options).get("port")
        if isinstance(port, int) and port not in PORTS:
            yield (
                (options, "port"),
                f"{port} is not a port: use a number from {PORTS[0]} to {PORTS[-1]}",
            )


def _invalid_host(config: Any) -> Iterator[KeyFinding]:
    """Check the address to listen on. A name is looked up at the start."""
    host = _read_text(read_mapping(config, "http_options"), "host")
    if host is not None and not _is_host(host):
        yield (
            ("http_options", "host"),
            f"`{host}` is not an address: use `127.0.0.1` for this host only, or `0.0.0.0` or `::`",
        )


def _is_host(text: str) -> bool:
    try:
        if _DIGITS_AND_DOTS.fullmatch(text):
            socket.inet_aton(text)  # accepts `127.1`, as a server does
        elif ":" in text:
            ipaddress.IPv6Address(text)
        else:
            return bool(_HOST_NAME.fullmatch(text))
    except (OSError, ValueError):
        return False
    return True


def _unusable_http_options(config: Any) -> Iterator[KeyFinding]:
    if config.get("proxy_location") == "Disabled":
        yield (
            ("proxy_location",),
            "`Disabled` starts no HAProxy, so no client reaches the server: use `EveryNode`",
        )
    options, path = read_mapping(config, "http_options"), ("http_options",)
    for key in TLS_OPTIONS:
        if options.get(key) is not None:
            yield (
                (*path, key),
                "HAProxy sends plain HTTP to the replicas, so none would become ready: remove it, "
                "and end TLS in a proxy before HAProxy, or on one host in HAProxy itself with "
                "`hundredfold serve --ssl-certfile`",
            )
    keep_alive_s = options.get("keep_alive_timeout_s")
    if isinstance(keep_alive_s, int) and keep_alive_s < 1:
        yield (*path, "keep_alive_timeout_s"), f"{keep_alive_s} s must be at least 1 s"
    if options.get("request_timeout_s") is not None:
        yield (
            (*path, "request_timeout_s"),
            "has no effect, because HAProxy turns it off for each request: remove it, and use "
            "`user_config.timeout_s` and `generation_timeout_s` of the Ingress",
        )


def _invalid_route_prefix(application: ApplicationEntry) -> Iterator[KeyFinding]:
    """Check the route prefix, which Serve does not validate when it reads a config."""
    prefix = application.raw.get("route_prefix")
    if isinstance(prefix, str) and prefix != "/" and not _ROUTE_PREFIX.fullmatch(prefix):
        yield (
            (*application.path, "route_prefix"),
            f"`{prefix}` must start with `/`, must not end with `/`, and between them must have "
            "only letters, digits and `-._~:@+=!`",
        )


def _invalid_models(application: ApplicationEntry) -> Iterator[KeyFinding]:
    """Check ids and versions, which the replicas would look up in the store at their start."""
    models = read_mapping(application.raw, "args").get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        path = (*application.path, "args", "models", index)
        model_id, version = (_read_text(model, key) for key in ("id", "version"))
        if model_id is not None and not is_model_id(model_id):
            yield (*path, "id"), f"`{model_id}` is not a model id: use `ORGANIZATION/NAME`"
        if version is None or version == LATEST_NAME or VERSION.fullmatch(version):
            continue
        yield (
            (*path, "version"),
            f"`{version}` is not a version: use `{LATEST_NAME}`, or the 12 hexadecimal digits of "
            "a version (`hundredfold models ls`)",
        )


def _unusable_providers(application: ApplicationEntry) -> Iterator[KeyFinding]:
    args = read_mapping(application.raw, "args")
    for kind in ("encoders", "generators"):
        for device in Device:
            providers = read_mapping(read_mapping(args, kind), device.value).get("providers")
            path = (*application.path, "args", kind, device.value, "providers")
            if providers == []:
                yield path, "is empty: name a provider of ONNX Runtime, or remove the key"
            for index, name in enumerate(providers if isinstance(providers, list) else ()):
                if not isinstance(name, str) or name in PROVIDERS:
                    continue
                close = difflib.get_close_matches(name.lower(), _PROVIDER_BY_LOWER, n=1)
                hint = f"; did you mean `{_PROVIDER_BY_LOWER[close[0]]}`?" if close else ""
                yield (*path, index), f"ONNX Runtime has no provider `{name}`{hint}"


def _invalid_origins(application: ApplicationEntry) -> Iterator[KeyFinding]:
    """Check the origins, which the server compares with what a browser sends."""
    for entry in application.ingresses():
        cors = read_mapping(read_mapping(entry.raw, "user_config"), "cors")
        origins = cors.get("origins")
        for index, origin in enumerate(origins if isinstance(origins, list) else ()):
            valid = origin == WILDCARD or not isinstance(origin, str) or _is_origin(origin)
            if not valid:
                yield (
                    (*entry.path, "user_config", "cors", "origins", index),
                    f"`{origin}` is not an origin, so no page would match it: write the scheme and "
                    "the host in lower case, without a path, as `https://example.org`",
                )


def _read_text(owner: Any, key: str) -> str | None:
    """Return the text under `key`; None if there is no text."""
    value = owner.get(key) if isinstance(owner, dict) else None
    return value if isinstance(value, str) else None
