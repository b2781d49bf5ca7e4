"""The linter refuses configs that let other hosts connect without API keys."""

from __future__ import annotations

import pytest
import yaml

from cluster.linting.linter import check_text
from tests.support.checked_configs import (
    INGRESS,
    check_config,
    create_config,
    to_dotted_path,
)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", None])
def test_other_hosts_need_keys_or_a_statement(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HUNDREDFOLD_KEYS", raising=False)
    config = create_config({})
    config["http_options"].pop("host")  # without it, Serve listens on all network interfaces
    config["http_options"] |= {} if host is None else {"host": host}
    settings = config["applications"][0]["deployments"][0]["user_config"]
    (problem,) = check_text(yaml.safe_dump(config))
    assert to_dotted_path(problem.path) == f"{INGRESS}.user_config.key_file"
    assert "without API keys" in problem.message
    assert check_text(yaml.safe_dump(config), is_deployed=False) == []
    settings["key_file"] = "/keys/keys.json"
    assert check_text(yaml.safe_dump(config)) == []
    settings |= {"key_file": None, "no_auth": True}
    assert check_text(yaml.safe_dump(config)) == []


def test_key_file_of_an_unknown_user_is_accepted() -> None:
    key_file = {f"{INGRESS}.user_config.key_file": "~no-such-user/keys.json"}
    assert check_config({"http_options.host": "0.0.0.0", **key_file}) == []
