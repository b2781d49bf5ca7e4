"""API keys in a Serve config: set the key file, and reject a server that is open without keys."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

from cluster.config_entries import find_ingresses
from cluster.start_errors import StartError, UnusableConfig
from deployments.config import KEY_FILE_VARIABLE, IngressUserConfig
from deployments.errors import BadSetting
from deployments.keys.key_file import read_key_file


def use_key_file(config: dict[str, Any], key_file: Path) -> None:
    """Set `key_file` in the `user_config` of every Ingress of a Serve config."""
    for entry in find_ingresses(config):
        user_config = entry.raw.get("user_config") or {}
        entry.raw["user_config"] = {**user_config, "key_file": str(key_file)}


def key_file_environment(key_file: Path | None) -> dict[str, str]:
    """Return the environment variable that tells replicas the key file of their host or pod.

    `serve deploy` replaces the config, and with it the `key_file` that `use_key_file` set. Because
    of the variable, replicas then still require keys.
    """
    return {} if key_file is None else {KEY_FILE_VARIABLE: str(key_file)}


def find_key_file(config: dict[str, Any]) -> Path | None:
    """Return the key file of the first Ingress.

    Return None if any Ingress requires no keys, or if the config has no Ingress.
    """
    paths = [each.key_file_path() for each in _parse_ingress_settings(config)]
    return paths[0] if paths and all(paths) else None


def states_no_auth(config: dict[str, Any]) -> bool:
    """Return whether every Ingress lets other hosts connect without keys (`no_auth`)."""
    settings = _parse_ingress_settings(config)
    return bool(settings) and all(each.no_auth for each in settings)


def check_access(config: dict[str, Any], host: str, *, no_auth: bool) -> None:
    """Raise StartError for an unusable key file, UnusableConfig for a `host` open without keys.

    `no_auth`, as an argument or in the config, permits a `host` that is open without keys. A
    gateway on this host (`limits.trusted_proxies`) opens loopback too.
    """
    key_file = find_key_file(config)
    if key_file is not None:
        try:
            read_key_file(key_file)
        except BadSetting as error:
            raise StartError(error.message) from error
    elif not no_auth and not states_no_auth(config):
        if not is_loopback(host):
            cause = f"`{host}` lets"
        elif _has_gateway(config):
            cause = "the gateway of `limits.trusted_proxies` lets"
        else:
            return
        raise UnusableConfig(
            f"{cause} other hosts connect, and no API keys are configured",
            hint="create a key with `hundredfold keys add NAME` and serve with `--keys FILE`, "
            "or admit every caller with `--no-auth`, for instance behind a gateway",
        )


def _has_gateway(config: dict[str, Any]) -> bool:
    return any(each.limits.trusted_proxies for each in _parse_ingress_settings(config))


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach `host`; False for all names except `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parse_ingress_settings(config: dict[str, Any]) -> list[IngressUserConfig]:
    entries = find_ingresses(config)
    return [IngressUserConfig.parse(entry.raw.get("user_config")) for entry in entries]
