"""A user without a home directory, as in a container with a user id of its own."""

from __future__ import annotations

import pwd

import pytest


def remove_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", find_none)
