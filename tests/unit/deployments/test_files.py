from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deployments.files import TEMPORARY_FILE, write_atomically
from tests.support.ordinary_rights import NOBODY


def test_new_file_has_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_atomically(path, b"new", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_replaced_file_keeps_owner_group_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b"old")
    path.chmod(0o640)
    if os.geteuid() == 0:  # only root can change the owner of a file
        os.chown(path, NOBODY, NOBODY)
    before = path.stat()
    write_atomically(path, b"new", mode=0o600)
    after = path.stat()
    assert path.read_bytes() == b"new"
    assert after.st_ino != before.st_ino
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert stat.S_IMODE(after.st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_file_of_another_owner_is_replaced_with_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b"old")
    path.chmod(0o644)

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    write_atomically(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_failed_write_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "full").mkdir(parents=True)  # cannot be replaced by a file
    with pytest.raises(OSError, match="target"):
        write_atomically(target, b"new")
    assert list(tmp_path.iterdir()) == [target]


def test_threads_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    contents = [bytes([i]) * 100_000 for i in range(4)]
    path = tmp_path / "file"
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            list(threads.map(lambda content: write_atomically(path, content), contents))
            assert path.read_bytes() in contents


def test_interrupted_write_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []

    def replace(self: Path, _target: Path) -> None:
        kept.append(self.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "latest", b"new")
    assert TEMPORARY_FILE.fullmatch(kept[0])
    assert list(tmp_path.iterdir()) == []
