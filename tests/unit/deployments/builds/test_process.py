from __future__ import annotations

from pathlib import Path

import pytest

from deployments.builds import process


def test_builder_may_connect_to_a_hub_although_replicas_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", "/own")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(
        process.subprocess, "Popen", lambda *_args, env, **_options: started.append(env)
    )
    process.start_builder(tmp_path, 1 << 30)
    (environment,) = started
    assert "HF_HUB_OFFLINE" not in environment
    assert environment["PYTHONPATH"].endswith(":/own")
