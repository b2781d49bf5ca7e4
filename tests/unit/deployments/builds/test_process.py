from __future__ import annotations

from pathlib import Path

import pytest

from deployments.builds import process


@pytest.mark.parametrize("is_offline", [False, True])
def test_builder_may_connect_to_a_hub_unless_the_operator_forbids_it(
    is_offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas run with HF_HUB_OFFLINE=1, which a builder must not inherit from them."""
    if is_offline:
        monkeypatch.setenv(process.HUB_OFFLINE_VARIABLE, "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", "/own")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(
        process.subprocess, "Popen", lambda *_args, env, **_options: started.append(env)
    )
    process.start_builder(tmp_path, 1 << 30)
    (environment,) = started
    assert environment.get("HF_HUB_OFFLINE") == ("1" if is_offline else None)
    assert environment["PYTHONPATH"].endswith(":/own")
