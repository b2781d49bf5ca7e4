"""The lines that `hundredfold serve` prints once the server answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config_entries import IMPORT_PATH
from cluster.launcher.startup_messages import startup_messages
from deployments.artifacts.store import LATEST_NAME, model_directory
from deployments.artifacts.types import TaskName
from deployments.tasks import TASKS
from tests.support.artifacts import seal_tiny

VERSION = "0123456789ab"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUNDREDFOLD_KEYS", raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with the model org/one."""
    directory = model_directory(tmp_path, "org/one")
    (directory / VERSION).mkdir(parents=True)
    (directory / LATEST_NAME).write_text(VERSION)
    return tmp_path


def config(store: Path, **args: Any) -> dict[str, Any]:
    other = {"import_path": "shop:app", "args": {"models": [{"id": "shop/model"}]}}
    args["store"] = str(store)
    return {"applications": [other, {"import_path": IMPORT_PATH, "args": args}]}


def test_example_is_a_request_to_the_first_model(store: Path) -> None:
    (line,) = startup_messages("http://here", config(store, models=[{"id": "org/one"}]))
    assert line.startswith("serving on http://here - try: curl http://here/models/org/one -d ")


def test_example_fits_the_task_of_the_model(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "org/ranker", labels=("SCORE",), tasks=(TaskName.TEXT_RANKING,))
    (line,) = startup_messages("http://here", config(tmp_path, models=[{"id": "org/ranker"}]))
    body = line.partition(" -d ")[2].strip("'")
    assert json.loads(body) == TASKS[TaskName.TEXT_RANKING].example


def test_models_that_are_not_built_are_named(store: Path) -> None:
    models = [
        {"id": "org/none"},
        {"id": "org/one", "version": "ba9876543210"},
        {"id": "org/one", "version": VERSION},
        {"id": "org/other", "version": None},
    ]
    missing, serving = startup_messages("http://here", config(store, models=models[::3]))
    assert missing == "not built yet: `org/none`, `org/other`"
    assert serving == "serving on http://here - try: curl http://here/models"
    _, serving = startup_messages("http://here", config(store, models=models[:3]))
    assert "/models/org/one -d" in serving


def test_damaged_model_is_not_called_missing(store: Path) -> None:
    (model_directory(store, "org/one") / LATEST_NAME).write_text("")
    (line,) = startup_messages("http://here", config(store, models=[{"id": "org/one"}]))
    assert line.startswith("serving on")


def test_port_of_grpc_is_named(store: Path) -> None:
    (line,) = startup_messages("http://here", config(store), 8001)
    assert line == "serving on http://here, gRPC on port 8001 - try: curl http://here/models"


@pytest.mark.parametrize("args", [{}, {"models": []}, {"models": None}])
def test_example_without_models_lists_those_of_the_store(args: dict[str, Any], store: Path) -> None:
    (line,) = startup_messages("http://here", config(store, **args))
    assert line == "serving on http://here - try: curl http://here/models"


def test_example_of_https_works(store: Path) -> None:
    """The certificate does not name the loopback address."""
    (line,) = startup_messages("https://127.0.0.1:8000", config(store))
    assert line.endswith("try: curl --insecure https://127.0.0.1:8000/models")


def test_line_tells_that_other_hosts_can_connect(store: Path) -> None:
    opened = {**config(store), "http_options": {"host": "0.0.0.0"}}
    (line,) = startup_messages("http://127.0.0.1", opened)
    assert line.startswith(
        "serving on http://127.0.0.1 and all other addresses of this host - try: curl http://127"
    )
