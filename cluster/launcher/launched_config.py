"""The config that `hundredfold serve` serves: a file and options of the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.access import check_access, use_key_file
from cluster.config_entries import find_applications
from cluster.edge.certificate import CertificateFiles
from cluster.edge.haproxy_config import METRICS_HOST, ClientLimits
from cluster.linting.document import format_path
from cluster.ports import HTTP_PORT, format_address
from cluster.processes import SERVE_STOP_S
from cluster.start_errors import StartError, UnusableConfig, file_errors
from deployments.artifacts.store import LATEST_NAME
from deployments.config import STORE_VARIABLE, AppArgs
from deployments.errors import ServeError, UnknownModel
from deployments.plan.plan_file import read_plan
from deployments.plan.resolution import find_traffic

DEFAULT_LIMITS = ClientLimits()
# Address of all interfaces -> loopback address.
LOOPBACK_BY_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `hundredfold serve`."""

    config: Path
    run_dir: Path  # logs, lock and session id; each cluster needs its own directory
    models: tuple[str, ...] = ()  # ids, for `models` of the config; empty: those of the config
    host: str | None = None  # None: from the config
    port: int | None = None  # None: from the config
    grpc_port: int | None = None  # None: no gRPC
    metrics_host: str = METRICS_HOST
    metrics_port: int | None = None  # None: the default if it is free, else another
    key_file: Path | None = None  # None: from the config, else $HUNDREDFOLD_KEYS
    certificate: CertificateFiles | None = None  # None: no TLS
    no_auth: bool = False  # whether other hosts may connect without keys
    connections_per_client: int = DEFAULT_LIMITS.connections
    max_requests: int = DEFAULT_LIMITS.requests
    num_gpus: int | None = None  # None: GPUs that an installed engine can use
    start_timeout_s: float = 180.0
    stop_timeout_s: float = SERVE_STOP_S


class LaunchedConfig:
    """The config file of `settings`, with the options of the command line applied."""

    def __init__(self, settings: ServeOptions) -> None:
        self._settings = settings
        self._text = ""
        self._last: dict[str, Any] = {}

    @property
    def last(self) -> dict[str, Any]:
        """The config of the last read that succeeded; empty before the first one."""
        return self._last

    def read(self) -> dict[str, Any]:
        """Lint and read the file. Later reads keep the host and port of the first read.

        Raises UnusableConfig if the file has problems, if no client could reach the application,
        if it opens the server to other hosts without keys, or if the store lacks a version that it
        names. Raises StartError for an unusable key file, or if config or store cannot be read.
        """
        settings = self._settings
        reject_problems(settings.config)
        text = settings.config.read_text(encoding="utf-8")
        config: dict[str, Any] = yaml.safe_load(text)
        http = config.setdefault("http_options", {})
        http["host"] = settings.host or http.get("host", "127.0.0.1")
        http["port"] = int(http.get("port", HTTP_PORT)) if settings.port is None else settings.port
        if self._last:  # HAProxy still listens on its first address
            http |= {name: self._last["http_options"][name] for name in ("host", "port")}
        if settings.key_file is not None:
            use_key_file(config, settings.key_file)
        if settings.models:
            use_models(config, settings.models)
        for opened in (http["host"], settings.metrics_host):
            check_access(config, opened, no_auth=settings.no_auth)
        if find_prefix(config) and settings.grpc_port is not None:
            raise UnusableConfig(
                "gRPC has no prefix of paths, but `route_prefix` of the application is not `/`",
                hint="set it to `/`, or serve without `--grpc-port`",
            )
        check_store(config)
        self._text, self._last = text, config
        return config

    def refresh(self, report: Callable[[str], None]) -> dict[str, Any]:
        """Return the config. Read the file again if it has changed since the last read.

        When Serve ends, it loses its config. Operators may have changed the file and deployed it
        before. A restart with the old config would undo these changes. If the file now has a
        problem, report it and return the config of the last read.
        """
        try:
            if self._settings.config.read_text(encoding="utf-8") != self._text:
                self.read()
        except (OSError, UnicodeDecodeError, ServeError) as error:
            report(f"{error}\nserving the config that was read before")
        return self._last

    def find_url(self) -> str:
        """Return the URL for clients on this host, as in the config of the last read."""
        http = self._last["http_options"]
        host = LOOPBACK_BY_WILDCARD.get(http["host"], http["host"])
        address = format_address(host, http["port"])
        scheme = "http" if self._settings.certificate is None else "https"
        return f"{scheme}://{address}{find_prefix(self._last)}"


def use_models(config: dict[str, Any], models: Sequence[str]) -> None:
    """Change `config`: replace the models of each application of this project by `models`."""
    for application in find_applications(config):
        if application.is_hundredfold:
            args = application.raw.setdefault("args", {})
            args["models"] = [{"id": model, "version": LATEST_NAME} for model in models]


def find_prefix(config: dict[str, Any]) -> str:
    """Return the path below which clients find the server, without a slash at its end.

    Raises UnusableConfig if no client could reach it.
    """
    for application in find_applications(config):
        if application.is_hundredfold:
            prefix = application.raw.get("route_prefix", "/")
            if prefix is None:
                raise UnusableConfig(
                    "`route_prefix` of the application is null, so no client could reach it",
                    hint="set it to `/`",
                )
            return str(prefix).rstrip("/")
    return ""


def check_store(config: dict[str, Any]) -> None:
    """Raise UnusableConfig if no replica could start with the store and the versions of `config`.

    Pass a store that does not exist: it may be mounted later. Raises StartError if the store cannot
    be read.
    """
    for application in find_applications(config):
        if not application.is_hundredfold:
            continue
        args = AppArgs.model_validate(application.raw.get("args") or {})
        store, field = args.store_path(), format_path((*application.path, "args"))
        with file_errors(store):
            if not store.exists():
                continue
            if not store.is_dir():
                raise UnusableConfig(
                    f"the store `{store}` is not a directory",
                    hint=f"set `{field}.store` or ${STORE_VARIABLE} to the directory of the models",
                )
            _check_versions(args, store, field)


def _check_versions(args: AppArgs, store: Path, field: str) -> None:
    """Raise UnusableConfig if the store lacks the version that answers for a configured one."""
    for index, model in enumerate(args.models):
        if model.version == LATEST_NAME:
            continue
        try:
            find_traffic(store, read_plan(store), model.id, {model.id: model.version})
        except UnknownModel as error:
            raise UnusableConfig(
                f"`{field}.models[{index}].version`: {error.message}",
                hint=f"build it, or name a version that the store `{store}` has "
                "(`hundredfold models ls`)",
            ) from error
        except ServeError as error:  # a damaged file of the store, which the config cannot change
            raise StartError(f"`{field}.models[{index}].version`: {error.message}") from error


def move_behind_edge(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config for Serve, with 127.0.0.1 as the host on which ingress replicas listen.

    HAProxy listens for clients and connects to the replicas on 127.0.0.1. On other addresses,
    clients could reach the replicas without the limits of HAProxy.
    """
    return {**config, "http_options": {**config["http_options"], "host": "127.0.0.1"}}


def reject_problems(config: Path) -> None:
    """Lint the config before processes start, because Serve ignores unknown keys.

    Raises UnusableConfig, also if the file does not exist, or StartError if it cannot be read.
    """
    # Late, because an import of Ray takes a second.
    from cluster.linting.linter import check_file, report

    try:
        problems = check_file(config, is_deployed=False)  # check_access checks host and keys
    except FileNotFoundError as exc:
        raise UnusableConfig(
            f"`{config}` does not exist", hint="name the file, `hundredfold serve FILE`"
        ) from exc
    except OSError as exc:  # a service manager tries again: the disk may answer later
        raise StartError(f"cannot read `{config}`: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise UnusableConfig(f"cannot read `{config}`: {exc}") from exc
    if problems:
        raise UnusableConfig(f"`{config}` has problems\n{report(config.name, problems)}")
