"""The config that `hundredfold serve` serves: a file and options of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.access import check_access, use_key_file
from cluster.progress import StartError


@dataclass(slots=True, kw_only=True)
class ServedConfig:
    """A config file and the options of the command line that replace settings of it."""

    file: Path
    metrics_host: str
    host: str | None = None  # None: from the file
    port: int | None = None  # None: from the file
    key_file: Path | None = None  # None: from the file
    no_auth: bool = False
    _text: str = field(default="", init=False)
    _last: dict[str, Any] = field(default_factory=dict, init=False)

    def read(self) -> dict[str, Any]:
        """Lint and read the file. Later reads keep host and port of the first.

        Raises StartError if the file has problems, or opens the server to other hosts without keys.
        """
        reject_problems(self.file)
        text = self.file.read_text(encoding="utf-8")
        config: dict[str, Any] = yaml.safe_load(text)
        http = config.setdefault("http_options", {})
        host = http["host"] = self.host or http.get("host", "127.0.0.1")
        port = http["port"] = int(http.get("port", 8000)) if self.port is None else self.port
        if self.key_file is not None:
            use_key_file(config, self.key_file)
        for opened in (host, self.metrics_host):
            check_access(config, opened, no_auth=self.no_auth)
        self.host, self.port, self._text, self._last = host, port, text, config
        return config

    def refresh(self, report: Callable[[str], None]) -> dict[str, Any]:
        """Return the config, read again if the file has changed since.

        Serve keeps no config when it ends, so a restart would otherwise undo changes that were
        deployed. If the file has problems now, report them and return what was read last.
        """
        try:
            if self.file.read_text(encoding="utf-8") != self._text:
                self.read()
        except (OSError, UnicodeDecodeError, StartError) as error:
            report(f"{error}\nserving the config that was read before")
        return self._last


def move_behind_edge(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config for Serve, with 127.0.0.1 as the host on which ingress replicas listen.

    HAProxy listens for clients and connects to the replicas on 127.0.0.1. On other addresses,
    clients could reach the replicas without the limits of HAProxy.
    """
    return {**config, "http_options": {**config["http_options"], "host": "127.0.0.1"}}


def reject_problems(config: Path) -> None:
    """Lint the config before processes start, because Serve ignores unknown keys.

    Raises StartError.
    """
    from cluster.check import check_file, report  # imported late: Ray takes a second

    try:
        problems = check_file(config, is_deployed=False)  # check_access checks host and keys
    except (OSError, UnicodeDecodeError) as exc:
        raise StartError(f"cannot read `{config}`: {exc}") from exc
    if problems:
        raise StartError(f"`{config}` has problems\n{report(config.name, problems)}")
