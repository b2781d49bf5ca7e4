from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.access import (
    check_access,
    find_key_file,
    is_loopback,
    key_file_environment,
    use_key_file,
)
from cluster.config_entries import IMPORT_PATH
from cluster.start_errors import StartError, UnusableConfig
from tests.support.keys import add_key


def config(key_file: Path | None = None) -> dict[str, Any]:
    user_config = {} if key_file is None else {"user_config": {"key_file": str(key_file)}}
    ingress = {"name": "Ingress", **user_config}
    return {"applications": [{"import_path": IMPORT_PATH, "deployments": [ingress]}]}


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUNDREDFOLD_KEYS", raising=False)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.0.0.9", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False),
    ],
)  # fmt: skip
def test_only_loopback_is_bound_without_keys(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    check_access(config(), host, no_auth=True)
    if loopback:
        check_access(config(), host, no_auth=False)
    else:
        with pytest.raises(StartError, match="no API keys are configured") as refused:
            check_access(config(), host, no_auth=False)
        assert "--no-auth" in refused.value.hint


def test_config_may_state_that_no_keys_are_needed() -> None:
    stated = config()
    stated["applications"][0]["deployments"][0]["user_config"] = {"no_auth": True}
    check_access(stated, "0.0.0.0", no_auth=False)
    with pytest.raises(StartError, match="no API keys"):
        check_access({"applications": [{}]}, "0.0.0.0", no_auth=False)


def test_gateway_on_this_host_needs_keys_or_a_statement(tmp_path: Path) -> None:
    """The server is on loopback, but clients of other hosts reach it through the gateway."""
    behind = config()
    settings: dict[str, Any] = {"limits": {"trusted_proxies": 1}}
    behind["applications"][0]["deployments"][0]["user_config"] = settings
    with pytest.raises(UnusableConfig, match=r"the gateway of .* lets other hosts"):
        check_access(behind, "127.0.0.1", no_auth=False)
    check_access(behind, "127.0.0.1", no_auth=True)
    settings["key_file"] = str(tmp_path / "keys.json")
    add_key(tmp_path / "keys.json")
    check_access(behind, "127.0.0.1", no_auth=False)


def test_keys_allow_other_hosts(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path)
    check_access(config(path), "0.0.0.0", no_auth=False)
    served = config()
    use_key_file(served, path)
    assert served == config(path)
    check_access(served, "0.0.0.0", no_auth=False)


def test_ingress_of_another_application_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    foreign = {"name": "Ingress", "user_config": {"color": "red"}}
    both, alone = config(), config()
    for each in (both, alone):
        each["applications"].append({"import_path": "shop:app"})
    both["applications"][1]["deployments"] = [foreign]
    use_key_file(both, path)
    assert foreign == {"name": "Ingress", "user_config": {"color": "red"}}
    assert find_key_file(both) == path


def test_keys_of_the_command_line_outlive_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    for name, value in key_file_environment(path).items():
        monkeypatch.setenv(name, value)
    assert find_key_file(config()) == path
    assert key_file_environment(None) == {}


def test_key_file_of_the_environment_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    add_key(path)
    monkeypatch.setenv("HUNDREDFOLD_KEYS", str(path))
    check_access(config(), "0.0.0.0", no_auth=False)


@pytest.mark.parametrize("no_auth", [False, True])
def test_unreadable_key_file_stops_the_start(tmp_path: Path, no_auth: bool) -> None:
    with pytest.raises(StartError, match="hundredfold keys add"):
        check_access(config(tmp_path / "none.json"), "127.0.0.1", no_auth=no_auth)
