"""The keys that the server accepts now: the key file, read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deployments.errors import BadSetting, Unauthorized
from deployments.keys.caller import Caller
from deployments.keys.key import ApiKey, KeyLimits, has_key_form, key_id, matches_digest
from deployments.keys.key_file import read_key_file
from deployments.keys.limits import KeyMeter
from deployments.watched_file import WatchedFile

log = logging.getLogger("ray.serve.hundredfold")

# A key with an unknown id is compared with this digest. The check then takes as long as for a known
# id, so its duration does not reveal which ids exist.
NO_DIGEST = bytes(32)
UNLIMITED = KeyLimits()


class _StoredKey(NamedTuple):
    key: ApiKey
    digest: bytes
    caller: Caller


class KeyRing:
    """The keys of one file. Not thread-safe.

    A changed file takes effect within a second. While the file is missing or invalid, the last
    valid keys stay in use. A mistake in the file therefore locks no client out.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file `path`. Raises BadSetting if it is missing or invalid."""
        self.path = path
        self._file = WatchedFile(path, clock)
        self._entries: dict[str, _StoredKey] = {}
        self._load()

    def authenticate(self, key: str) -> Caller:
        """Return the caller with this key. Raises Unauthorized if the key is invalid or expired."""
        self._reload_if_changed()
        key = key if has_key_form(key) else ""  # prevents hashing a long text
        entry = self._entries.get(key_id(key))
        digest = NO_DIGEST if entry is None else entry.digest
        # Unknown ids and wrong secrets get the same message, which does not reveal which ids exist.
        if not matches_digest(key, digest) or entry is None:
            raise Unauthorized("the API key is not valid")
        if entry.key.is_expired():
            raise Unauthorized(f"the API key `{entry.key.name}` expired on {entry.key.expires}")
        return entry.caller

    def _reload_if_changed(self) -> None:
        if not self._file.has_changed():
            return
        try:
            self._load()
            log.info("read %d keys from %s", len(self._entries), self.path)
        except BadSetting as error:
            self._file.recheck_after(error)
            log.error("the previous keys stay in use: %s", error.message)

    def _load(self) -> None:
        keys = read_key_file(self.path).keys
        self._entries = {
            key.id: _StoredKey(key, bytes.fromhex(key.sha256), self._caller(key)) for key in keys
        }

    def _caller(self, key: ApiKey) -> Caller:
        """Build the caller of a key. A reloaded key keeps its meter, which counts open requests."""
        meter = None
        if key.limits != UNLIMITED:
            previous = self._entries.get(key.id)
            meter = (previous and previous.caller.meter) or KeyMeter(key.name, key.limits)
            meter.limits = key.limits
        return Caller(key.name, key.scopes, key.models, meter)
