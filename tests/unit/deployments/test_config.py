from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.artifacts.types import Device
from deployments.config import (
    STORE_VARIABLE,
    USER_CONFIGS,
    AppArgs,
    BatchSettings,
    EncoderUserConfig,
    GeneratorSettings,
    IngressUserConfig,
    TokenizerUserConfig,
)
from deployments.errors import BadSetting
from tests.support.no_home import remove_home

SERVE_CONFIG = Path(__file__).parents[3] / "serve_config.yaml"


def minimal_args() -> dict[str, Any]:
    return {"models": [{"id": "org/name"}], "encoders": {"cpu": {}}}


@pytest.mark.parametrize(
    ("kind", "raw", "field"),
    [
        (IngressUserConfig, {"timout_s": 3}, "`timout_s`"),
        (IngressUserConfig, {"limits": {"itmes": 3}}, "`limits.itmes`"),
        (IngressUserConfig, {"limits": {"items": 0}}, "`limits.items`"),
        (IngressUserConfig, {"limits": {"body_timeout_s": 0}}, "`limits.body_timeout_s`"),
        (IngressUserConfig, {"limits": {"inflight_body_bytes": 9}}, "`inflight_body_bytes`"),
        (
            IngressUserConfig,
            {"limits": {"inflight_items": 9}},
            "`inflight_items` is 9; the minimum is `items`",
        ),
        (IngressUserConfig, {"timeout_s": 0}, "`timeout_s`"),
        (IngressUserConfig, {"cache": {"max_bytes": -1}}, "`cache.max_bytes`"),
        (IngressUserConfig, {"batching": {"batch_wait_timeout_s": -1}}, "batch_wait_timeout_s"),
        (TokenizerUserConfig, {"cache_bytes": "much"}, "`cache_bytes`"),
        (EncoderUserConfig, {"batching": {"max_batch_tokens": 0}}, "`batching.max_batch_tokens`"),
        (EncoderUserConfig, {"batching": {"budget": 9}}, "`batching.budget`"),
        (AppArgs, {}, "`encoders`"),
        (AppArgs, minimal_args() | {"models": [{}]}, "`models.0.id`"),
        (AppArgs, minimal_args() | {"encoders": {"tpu": {}}}, "`encoders.tpu"),
        (
            AppArgs,
            minimal_args() | {"encoders": {"cpu": {"available": "no"}}},
            "encoders.cpu.available",
        ),
        (AppArgs, minimal_args() | {"encoders": {"cpu": {"tune": "often"}}}, "encoders.cpu.tune"),
        (AppArgs, minimal_args() | {"encoders": {"cpu": {"tune": True}}}, "encoders.cpu.tune"),
        (AppArgs, minimal_args() | {"encoders": {"cpu": {"tune_seconds": 0}}}, "cpu.tune_seconds"),
        (AppArgs, minimal_args() | {"extra": 1}, "`extra`"),
        (AppArgs, minimal_args() | {"gpu_memory": 40}, "`gpu_memory`: Value error, 40 is neither"),
    ],
)
def test_parse_rejects_an_invalid_setting_with_its_path(
    kind: type[Any], raw: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadSetting) as raised:
        kind.parse(raw)
    assert field in raised.value.message


def test_parse_reports_all_errors_together() -> None:
    with pytest.raises(BadSetting, match=r"`timeout_s`.*`limits\.items`|`limits\.items`.*`timeo"):
        IngressUserConfig.parse({"timeout_s": 0, "limits": {"items": 0}})


@pytest.mark.parametrize("kind", dict.fromkeys(USER_CONFIGS.values()))
def test_parse_without_user_config_returns_defaults(kind: type[Any]) -> None:
    assert kind.parse(None) == kind.parse({}) == kind()


def test_settings_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        BatchSettings().max_batch_items = 5


@pytest.mark.parametrize("text", ["off", "'off'"])
def test_tune_off_needs_no_quotes_in_yaml(text: str) -> None:
    encoders = yaml.safe_load(f"cpu: {{tune: {text}}}")
    assert AppArgs.parse(minimal_args() | {"encoders": encoders}).encoders[Device.CPU].tune == "off"


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (4, 2), (8, 4), (16, 8), (96, 8)])
def test_steps_use_half_of_the_cores_unless_the_threads_are_set(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr("deployments.config.usable_cores", lambda: cores)
    derived = GeneratorSettings.parse({"intra_op_threads": None})
    assert derived.intra_op_threads is None, "the host of the replica decides"
    assert derived.resolve().intra_op_threads == threads
    assert GeneratorSettings.parse({"intra_op_threads": 3}).resolve().intra_op_threads == 3
    with pytest.raises(BadSetting, match="intra_op_threads"):
        GeneratorSettings.parse({"intra_op_threads": 0})


def test_encoders_are_keyed_by_device() -> None:
    args = AppArgs.parse(
        minimal_args() | {"encoders": {"cpu": {"concurrent_passes": 2}, "gpu": {}}}
    )
    assert args.encoders[Device.CPU].concurrent_passes == 2
    assert set(args.encoders) == {Device.CPU, Device.GPU}


@pytest.mark.parametrize(
    ("setting", "variable", "store"),
    [
        ("/from/settings", "/from/environment", Path("/from/settings")),
        ("~/own", None, Path.home() / "own"),
        (None, "/from/environment", Path("/from/environment")),
        (None, None, Path.home() / ".cache" / "hundredfold" / "store"),
    ],
)
def test_store_path_prefers_settings_then_environment_then_home(
    setting: str | None,
    variable: str | None,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(STORE_VARIABLE, variable)
    assert AppArgs.parse(minimal_args() | {"store": setting}).store_path() == store


@pytest.mark.parametrize("variable", ["", "~/own", "~no-such-user/own"])
def test_store_below_a_missing_home_is_refused(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_home(monkeypatch)
    monkeypatch.setenv(STORE_VARIABLE, variable)
    with pytest.raises(BadSetting, match="home of a user without one; set \\$HOME"):
        AppArgs.parse(minimal_args()).store_path()
    monkeypatch.setenv(STORE_VARIABLE, "./~own")
    assert AppArgs.parse(minimal_args()).store_path() == Path("./~own")


def test_shipped_serve_config_is_valid() -> None:
    (app,) = yaml.safe_load(SERVE_CONFIG.read_text(encoding="utf-8"))["applications"]
    args = AppArgs.parse(app["args"])
    parsed = {
        d["name"]: USER_CONFIGS[d["name"]].parse(d["user_config"]) for d in app["deployments"]
    }
    assert set(parsed) == set(USER_CONFIGS)
    assert set(args.encoders) == set(Device)
    assert "sentence-transformers/all-MiniLM-L6-v2" in {model.id for model in args.models}
