from __future__ import annotations

from pathlib import Path

import pytest

from deployments.messages import LoadedModel, ModelRef
from deployments.tuning import rounds
from deployments.tuning.background import Untuned
from deployments.tuning.rounds import INTERVAL_S, TuningRounds, choose_models
from tests.support.fakes import wait_until
from tests.support.tuning_artifacts import seal_tunable


def loaded(
    name: str,
    *,
    is_pinned: bool = False,
    rate: float = 1.0,
    age_s: float = INTERVAL_S,
    idle_s: float = 0.0,
) -> LoadedModel:
    return LoadedModel(ModelRef(name, "0123456789ab"), 1, is_pinned, 0, rate, age_s, idle_s)


class FakeTuner:
    def __init__(self) -> None:
        self.is_idle = True
        self.submitted: list[ModelRef] = []

    def has_submitted(self, model: ModelRef) -> bool:
        return model in self.submitted

    def submit(self, model: ModelRef, _: Untuned) -> None:
        self.submitted.append(model)


def names(refs: list[ModelRef]) -> list[str]:
    return [ref.id for ref in refs]


@pytest.fixture
def untuned(tmp_path: Path) -> Untuned:
    target = seal_tunable(tmp_path)
    return Untuned(target, None, (target,))


@pytest.mark.parametrize(
    ("models", "chosen"),
    [
        ([], []),
        ([loaded("a", is_pinned=True, age_s=0.0), loaded("b", is_pinned=True)], ["a", "b"]),
        ([loaded("a", rate=1.0), loaded("b", rate=3.0), loaded("c", rate=2.0)], ["b"]),
        ([loaded("a"), loaded("b", is_pinned=True)], ["b", "a"]),
        ([loaded("a", age_s=INTERVAL_S - 1)], []),
        ([loaded("a", idle_s=INTERVAL_S)], []),
    ],
    ids=["none", "pinned at once", "the busiest", "pinned first", "just loaded", "not used"],
)
def test_chosen_models(models: list[LoadedModel], chosen: list[str]) -> None:
    assert names(choose_models(models)) == chosen


def test_each_round_submits_one_more_model(untuned: Untuned) -> None:
    tuner = FakeTuner()
    models = [loaded(f"m{n}", rate=n) for n in range(200)]
    tuning = TuningRounds(tuner, lambda: [(model, untuned) for model in models])
    tuning.submit()
    tuning.submit()
    assert names(tuner.submitted) == ["m199", "m198"]


def test_busy_tuner_gets_no_models(untuned: Untuned) -> None:
    tuner = FakeTuner()
    tuner.is_idle = False
    TuningRounds(tuner, lambda: [(loaded("a", is_pinned=True), untuned)]).submit()
    assert tuner.submitted == []


async def test_rounds_repeat_and_survive_a_failure(
    untuned: Untuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "INTERVAL_S", 0.005)
    tuner = FakeTuner()
    states: list[list[LoadedModel] | None] = [[], None, [loaded("late", is_pinned=True)]]

    def list_untuned() -> list[tuple[LoadedModel, Untuned]]:
        models = states.pop(0) if len(states) > 1 else states[0]
        if models is None:
            raise OSError("the store is gone")
        return [(model, untuned) for model in models]

    tuning = TuningRounds(tuner, list_untuned)
    tuning.start()
    await wait_until(lambda: bool(tuner.submitted))
    tuning.close()
    assert names(tuner.submitted) == ["late"]
