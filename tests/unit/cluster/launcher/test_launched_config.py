"""Tests of the config that the launcher serves, at the first start and at later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.edge.certificate import CertificateFiles
from cluster.launcher.launched_config import (
    LaunchedConfig,
    ServeOptions,
    find_prefix,
    move_behind_edge,
)
from cluster.start_errors import StartError, UnusableConfig
from tests.support.checked_configs import create_config


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUNDREDFOLD_KEYS", raising=False)


def write(directory: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write the shipped config with `changes`, values by dotted path."""
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(create_config(changes or {})))
    return file


def served(file: Path, **options: Any) -> LaunchedConfig:
    return LaunchedConfig(ServeOptions(config=file, run_dir=file.parent, **options))


@pytest.mark.parametrize(
    ("options", "given", "port"),
    [
        ({}, None, 8000),  # as shipped
        ({"http_options.port": 9000}, None, 9000),
        ({"http_options.port": "9000"}, None, 9000),  # the schema of Serve accepts digits in quotes
        ({"http_options.port": 9000}, 9001, 9001),
        ({"http_options.port": 9000}, 0, 0),  # rejected later, not ignored
    ],
)
def test_port_of_the_command_line_replaces_that_of_the_config(
    tmp_path: Path, options: dict[str, Any], given: int | None, port: int
) -> None:
    config = served(write(tmp_path, options), port=given)
    assert config.read()["http_options"]["port"] == port


def list_models(config: dict[str, Any]) -> list[dict[str, str]]:
    models: list[dict[str, str]] = config["applications"][0]["args"]["models"]
    return models


def test_models_of_the_command_line_replace_those_of_the_config(tmp_path: Path) -> None:
    config = served(write(tmp_path), models=("acme/one", "two"))
    expected = [{"id": "acme/one", "version": "latest"}, {"id": "two", "version": "latest"}]
    assert list_models(config.read()) == expected
    write(tmp_path, {"logging_config": {"log_level": "ERROR"}})
    again = config.refresh(print)
    assert again["logging_config"] == {"log_level": "ERROR"}
    assert list_models(again) == expected, "the options of the command line hold after a restart"
    assert len(list_models(served(write(tmp_path)).read())) == 4


def test_restart_serves_what_was_deployed_meanwhile(tmp_path: Path) -> None:
    config = served(write(tmp_path, {"http_options.port": 9000}))
    assert config.read() == config.refresh(print)
    write(tmp_path, {"http_options.port": 9001, "logging_config": {"log_level": "ERROR"}})
    again = config.refresh(print)
    assert again["logging_config"] == {"log_level": "ERROR"}
    assert again["http_options"]["port"] == 9000, "HAProxy listens on the port of the start"


@pytest.mark.parametrize("text", ["applications: 5\n", "{", None])
def test_restart_with_a_damaged_file_serves_the_last_config(
    tmp_path: Path, text: str | None
) -> None:
    file = write(tmp_path)
    config = served(file)
    first = config.read()
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    reports: list[str] = []
    assert config.refresh(reports.append) == first
    (report,) = reports
    assert str(file.name) in report
    assert report.endswith("\nserving the config that was read before")


def test_restart_does_not_open_a_server_without_keys(tmp_path: Path) -> None:
    file = write(tmp_path)
    key_file = tmp_path / "keys.json"
    key_file.write_text('{"keys": []}')
    config = served(file, host="0.0.0.0", key_file=key_file)
    first = config.read()
    key_file.unlink()
    file.write_text(file.read_text() + "\n")
    reports: list[str] = []
    assert config.refresh(reports.append) == first
    assert "keys.json" in reports[0]


def test_url_follows_what_was_deployed_meanwhile(tmp_path: Path) -> None:
    config = served(write(tmp_path))
    config.read()
    assert config.find_url() == "http://127.0.0.1:8000"
    write(tmp_path, {"applications.0.route_prefix": "/v2"})
    assert config.find_url() == "http://127.0.0.1:8000", "nothing has read the change"
    config.refresh(print)
    assert config.find_url() == "http://127.0.0.1:8000/v2"


def test_restart_keeps_the_route_that_clients_can_reach(tmp_path: Path) -> None:
    config = served(write(tmp_path))
    config.read()
    write(tmp_path, {"applications.0.route_prefix": None})
    reports: list[str] = []
    config.refresh(reports.append)
    assert "no client could reach it" in reports[0]
    assert config.find_url() == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::1", "http://[fd00::1]:80"),
        ("example.org", "http://example.org:80"),
    ],
)
def test_clients_get_a_url_of_this_host(tmp_path: Path, host: str, url: str) -> None:
    config = served(write(tmp_path), host=host, port=80, no_auth=True)
    config.read()
    assert config.find_url() == url


def test_url_of_a_server_with_a_certificate_is_https(tmp_path: Path) -> None:
    config = served(write(tmp_path), certificate=CertificateFiles(Path("certificate.pem")))
    config.read()
    assert config.find_url() == "https://127.0.0.1:8000"


def test_problems_are_listed_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="has problems"):
        served(write(tmp_path, {"applications": 5})).read()


def test_version_that_the_store_lacks_is_named(tmp_path: Path) -> None:
    """The replicas would fail at their start, after half a minute."""
    model = {"id": "acme/ner", "version": "0123456789ab"}
    file = write(tmp_path, {"applications.0.args.models": [model]})
    config = served(file)
    store = tmp_path / "store"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HUNDREDFOLD_STORE", str(store))
        config.read()  # the store may be mounted later
        store.mkdir()
        with pytest.raises(UnusableConfig, match="Model acme/ner does not exist") as raised:
            config.read()
        assert "`applications[0].args.models[0].version`" in raised.value.message
        (store / "acme--ner" / "0123456789ab").mkdir(parents=True)
        config.read()
        (store / "plan.json").write_text("{")
        with pytest.raises(StartError, match=r"the plan .* is invalid"):
            config.read()


def test_store_that_is_no_directory_is_named(tmp_path: Path) -> None:
    store = tmp_path / "file"
    store.touch()
    file = write(tmp_path, {"applications.0.args.store": str(store)})
    with pytest.raises(UnusableConfig, match="is not a directory") as raised:
        served(file).read()
    assert "`applications[0].args.store`" in raised.value.hint


def test_replicas_behind_the_edge_listen_on_loopback() -> None:
    config = {**create_config({}), "http_options": {"host": "::", "port": 8000}}
    behind = move_behind_edge(config)
    assert behind == {**config, "http_options": {"host": "127.0.0.1", "port": 8000}}
    assert config["http_options"]["host"] == "::"


@pytest.mark.parametrize(("route", "prefix"), [("/", ""), ("/api", "/api"), ("/api/", "/api")])
def test_clients_find_the_server_below_its_prefix(route: str, prefix: str) -> None:
    other = {"import_path": "shop:app", "route_prefix": "/shop"}
    config = create_config({"applications.0.route_prefix": route})
    config["applications"].insert(0, other)
    assert find_prefix(config) == prefix


def test_application_without_a_route_is_refused() -> None:
    with pytest.raises(StartError, match="no client could reach it"):
        find_prefix(create_config({"applications.0.route_prefix": None}))


def test_grpc_needs_an_application_without_a_prefix(tmp_path: Path) -> None:
    file = write(tmp_path, {"applications.0.route_prefix": "/api"})
    config = LaunchedConfig(ServeOptions(config=file, run_dir=tmp_path, grpc_port=8001))
    with pytest.raises(UnusableConfig, match="gRPC has no prefix"):
        config.read()
