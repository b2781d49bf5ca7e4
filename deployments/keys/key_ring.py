"""The keys that the server accepts at this moment: the key file, read again when it changes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deployments.errors import BadSetting, Unauthorized
from deployments.keys.caller import Caller
from deployments.keys.key import ApiKey, KeyLimits, has_key_form, key_id, matches_digest
from deployments.keys.key_file import read_key_file
from deployments.keys.limits import KeyMeter

log = logging.getLogger("ray.serve.hundredfold")

CHECK_INTERVAL_S = 1.0  # between looks at the file; a look takes microseconds
# Compared with keys of an unknown id, so that these take as long as others.
NO_DIGEST = bytes(32)
UNLIMITED = KeyLimits()


class _Entry(NamedTuple):
    key: ApiKey
    digest: bytes
    caller: Caller


class KeyRing:
    """The keys of one file. Use from one event loop.

    A changed file counts CHECK_INTERVAL_S later at most. If it is missing or invalid, the last
    valid keys stay: neither does a slip of the pen lock everybody out, nor does it let anybody in.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises BadSetting if the file is missing or invalid."""
        self.path = path
        self._clock = clock
        self._checked_s = clock()
        self._state = _file_state(path)
        self._entries: dict[str, _Entry] = {}
        self._load()

    def authenticate(self, key: str) -> Caller:
        """Return the caller with this key. Raises Unauthorized."""
        self._reload_if_changed()
        key = key if has_key_form(key) else ""  # nothing long is hashed
        entry = self._entries.get(key_id(key))
        digest = NO_DIGEST if entry is None else entry.digest
        # One message for all: it must not tell which ids exist.
        if not matches_digest(key, digest) or entry is None:
            raise Unauthorized("the API key is not valid")
        if entry.key.is_expired():
            raise Unauthorized(f"the API key `{entry.key.name}` expired on {entry.key.expires}")
        return entry.caller

    def _reload_if_changed(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        state = _file_state(self.path)
        if state == self._state:
            return
        self._state = state
        try:
            self._load()
            log.info("read %d keys from %s", len(self._entries), self.path)
        except BadSetting as error:
            log.error("the previous keys stay in use: %s", error.message)

    def _load(self) -> None:
        keys = read_key_file(self.path).keys
        self._entries = {
            key.id: _Entry(key, bytes.fromhex(key.sha256), self._caller(key)) for key in keys
        }

    def _caller(self, key: ApiKey) -> Caller:
        """Build the caller of a key; requests in flight stay counted when the file changes."""
        meter = None
        if key.limits != UNLIMITED:
            previous = self._entries.get(key.id)
            meter = (previous and previous.caller.meter) or KeyMeter(key.name, key.limits)
            meter.limits = key.limits
        return Caller(key.name, key.scopes, key.models, meter)


def _file_state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the contents; None without the file. Links are followed."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
