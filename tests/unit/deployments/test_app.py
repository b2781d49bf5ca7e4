from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.default_config import find_config
from deployments.app import Tokenizer, build_app, prepare_replica
from deployments.artifacts.types import Device
from deployments.config import AppArgs
from deployments.deadlines import deadline_after
from deployments.errors import BadSetting, ModelUnavailable
from deployments.messages import BatchKey, Call, CallBatch, ModelRef, Truncation


@pytest.mark.parametrize(("cores", "replicas"), [(1, 1), (2, 1), (7, 1), (8, 2), (64, 16)])
def test_ingress_replicas_follow_from_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, replicas: int
) -> None:
    monkeypatch.setattr("deployments.app.count_cores", lambda: cores)
    (application,) = yaml.safe_load(find_config(None).read_text())["applications"]
    ingress = build_app(application["args"])
    assert ingress._bound_deployment.num_replicas == replicas


@pytest.fixture
def log_of_replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    monkeypatch.setattr("deployments.app.collect_rarely", lambda: None)
    monkeypatch.setattr("deployments.app.bind_grpc_to_node", lambda: None)
    log = logging.getLogger("ray.serve.hundredfold")
    previous = log.level
    yield log
    log.setLevel(previous)


@pytest.mark.parametrize(
    ("args", "level"), [({}, logging.INFO), ({"log_level": "DEBUG"}, logging.DEBUG)]
)
def test_level_of_the_log_is_the_configured_one(
    args: dict[str, Any], level: int, log_of_replicas: logging.Logger
) -> None:
    prepare_replica(AppArgs.parse({"encoders": {}, **args}))
    assert log_of_replicas.level == level


def test_unknown_level_of_the_log_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"`log_level`.*'DEBUG', 'INFO' or 'WARNING'"):
        AppArgs.parse({"encoders": {}, "log_level": "TRACE"})


class UnopenedTokenizer:
    async def tokenize_batch(self, _batch: CallBatch) -> None:
        raise ModelUnavailable("the tokenizer does not open")


async def test_tokenizer_returns_errors_to_calls_and_raises_those_of_loads() -> None:
    """The probe of a new version sends an empty batch, so no call can return its error."""
    deployment: Any = SimpleNamespace(_replica=UnopenedTokenizer())
    key = BatchKey(ModelRef("org/model", ""), task="", device=Device.CPU, long=False)
    call = Call(("a text",), ("inputs",), None, Truncation.REFUSE, deadline_after(60))
    answer = await Tokenizer.tokenize_batch(deployment, CallBatch(key, (call,)))
    assert [type(error) for error in answer.calls] == [ModelUnavailable]
    with pytest.raises(ModelUnavailable):
        await Tokenizer.tokenize_batch(deployment, CallBatch(key, ()))
