from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deployments.files import TEMPORARY_FILE, write_atomically


def test_file_is_replaced_with_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b"old")
    write_atomically(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


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
