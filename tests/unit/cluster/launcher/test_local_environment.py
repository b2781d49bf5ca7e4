from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cluster.launcher.local_environment import (
    WRAPPER,
    find_haproxy,
    find_ray_directory,
    has_own_ray_directory,
    local_environment,
    ray_temp_environment,
)
from cluster.start_errors import StartError
from tests.support.old_setpriv import install_old_setpriv


def test_haproxy_is_found_where_the_wrapper_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUNDREDFOLD_HAPROXY", raising=False)
    binary = find_haproxy()
    for name, value in local_environment().items():
        monkeypatch.setenv(name, value)
    assert os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] == str(WRAPPER)
    assert find_haproxy() == binary
    assert local_environment()["HUNDREDFOLD_HAPROXY"] == binary


def test_haproxy_runs_without_the_wrapper_on_a_host_with_an_old_setpriv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_old_setpriv(tmp_path, monkeypatch)
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in local_environment()


def test_sockets_of_a_node_are_short_enough() -> None:
    edge = Path("/tmp/hundredfold-1000-01234567")
    path = Path(local_environment(edge=edge)["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    assert len(str(path.parent / ("n" * 56) / path.name)) <= 107


def test_named_directory_for_ray_must_be_short() -> None:
    """Ray puts sockets there. Their paths have at most 107 bytes."""
    session = "ray/session_2026-11-27_18-47-29_123456_4194304/sockets/dash_TaskEventsHead"
    fits = "/" + "t" * (107 - len(session) - 2)
    assert len(f"{fits}/{session}") == 107
    named = {"TMPDIR": f"{fits}t", "RAY_TMPDIR": fits}
    assert ray_temp_environment(named) == {"RAY_TMPDIR": fits}
    with pytest.raises(StartError, match="has 33 bytes, the maximum is 32") as raised:
        ray_temp_environment({"RAY_TMPDIR": f"{fits}t"})
    assert raised.value.hint.endswith("a directory of this user")


def test_relative_directory_for_ray_is_measured_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 40)
    deep.mkdir()
    monkeypatch.chdir(deep)
    with pytest.raises(StartError, match=f"`{deep}/ray`, has "):
        ray_temp_environment({"RAY_TMPDIR": "ray"})
    monkeypatch.chdir("/")
    assert ray_temp_environment({"RAY_TMPDIR": "ray"}) == {"RAY_TMPDIR": "/ray"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RAY_TMPDIR": "", "TMPDIR": ""},
        {"RAY_TMPDIR": "", "TMPDIR": "/tmp"},
        {"TMPDIR": "/var/tmp"},
        {"TMPDIR": "/tmp/a'b"},
        {"TMPDIR": "/" + "t" * 99},
    ],
)
def test_users_have_directories_of_their_own_for_ray(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray replaces a file there, and its sockets are writable for everybody."""
    # Ray would put its files into a `TMPDIR` that is shared, or whose characters it cannot use.
    directory = Path(ray_temp_environment(environment)["RAY_TMPDIR"])
    assert directory == find_ray_directory()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 2**32 - 2)
    assert find_ray_directory() != directory
    assert len(str(find_ray_directory())) <= 32


def test_ended_sessions_are_removed_only_where_no_other_program_has_some() -> None:
    assert has_own_ray_directory(ray_temp_environment({}))
    assert not has_own_ray_directory({"RAY_TMPDIR": "/data/ray"})
    named = {"RAY_TMPDIR": "/data/ray", "LOGS_DIRECTORY": "/var/log/a:/data/ray"}
    assert has_own_ray_directory(named)


def test_directory_for_ray_becomes_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.launcher.local_environment.find_ray_directory", lambda: tmp_path)
    tmp_path.chmod(0o777)
    assert ray_temp_environment({}) == {"RAY_TMPDIR": str(tmp_path)}
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_directory_for_ray_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.setattr("cluster.launcher.local_environment.find_ray_directory", lambda: link)
    with pytest.raises(StartError, match="is not a directory of this user"):
        ray_temp_environment({})
    monkeypatch.setattr("cluster.launcher.local_environment.find_ray_directory", lambda: tmp_path)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(StartError, match="is not a directory of this user") as raised:
        ray_temp_environment({})
    assert "`$RAY_TMPDIR`" in raised.value.hint
