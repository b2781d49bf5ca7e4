"""The file of the plan in the store: functions that read, replace and watch it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from deployments.artifacts.locks import exclusive_lock
from deployments.artifacts.store import PLAN_NAME
from deployments.errors import PlanUnusable
from deployments.files import write_atomically
from deployments.messages import ModelRef
from deployments.plan.plan import ModelPlan, Plan, Refusal
from deployments.watched_file import WatchedFile

log = logging.getLogger("ray.serve.hundredfold")

AVOID_S = 300.0  # seconds until a version is tried again that this host cannot run


def read_plan(store: Path) -> Plan:
    """Return the plan of the store; without a file, an empty plan.

    Raises PlanUnusable if the file is unreadable or invalid.
    """
    path = store / PLAN_NAME
    try:
        return Plan.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Plan()
    except OSError as exc:
        raise PlanUnusable(f"cannot read the plan `{path}`: {exc.strerror}") from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        place = f"`{where}`: " if where else ""  # of no field, if the text is no JSON
        raise PlanUnusable(f"the plan `{path}` is invalid: {place}{first['msg']}") from exc


def plan_lock(store: Path) -> AbstractContextManager[None]:
    """Return a context that holds the lock on the plan. Its start raises OSError if it fails.

    While it is held, the plan and what it names cannot change.
    """
    return exclusive_lock(store / f"{PLAN_NAME}.lock", lambda _: None)


def change_model_plan(
    store: Path, model_id: str, change: Callable[[ModelPlan], ModelPlan | None]
) -> Plan:
    """Replace the plan of one model by the result of `change` and return the new plan.

    If `change` returns None, the model is removed from the plan. If the result equals the present
    plan, nothing is written. A lock serializes concurrent changes. Raises PlanUnusable if the plan
    is invalid or cannot be read or written.
    """
    path = store / PLAN_NAME
    try:
        with plan_lock(store):
            plan = read_plan(store)
            changed = change(plan.find(model_id)) or ModelPlan()
            if changed == plan.find(model_id):
                return plan
            others = {id: entry for id, entry in plan.models.items() if id != model_id}
            models = others if changed == ModelPlan() else {**others, model_id: changed}
            new = Plan(number=plan.number + 1, models=dict(sorted(models.items())))
            content = new.model_dump_json(indent=1, exclude_defaults=True) + "\n"
            write_atomically(path, content.encode())
            return new
    except OSError as exc:
        raise PlanUnusable(f"cannot write the plan `{path}`: {exc.strerror}") from exc


class _Avoided(NamedTuple):
    refusal: Refusal
    ends_s: float  # on the clock of the PlanWatch


class PlanWatch:
    """The present plan, which is read again when its file changes. Not thread-safe.

    If the file becomes invalid or is removed, the last valid plan stays. The present plan also
    refuses the versions to `avoid`.
    """

    def __init__(self, store: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the plan. Raises PlanUnusable if the file is invalid."""
        self._store = store
        self._clock = clock
        self._file = WatchedFile(store / PLAN_NAME, clock)
        self._plan = read_plan(store)  # as the file has it
        self._avoided: dict[ModelRef, _Avoided] = {}
        self._current = self._plan
        self._changes_s = inf  # when the next version stops being avoided

    def current(self) -> Plan:
        """Return the plan. A change of the file takes effect within a second."""
        if self._file.has_changed():
            self.reload()
        elif self._clock() >= self._changes_s:
            self._update()
        return self._current

    def avoid(self, ref: ModelRef, refusal: Refusal) -> None:
        """Refuse a version for AVOID_S, in this process only and not in the file."""
        self._avoided[ref] = _Avoided(refusal, self._clock() + AVOID_S)
        self._update()

    def _update(self) -> None:
        now_s, plan = self._clock(), self._plan
        self._avoided = {ref: one for ref, one in self._avoided.items() if one.ends_s > now_s}
        for ref, (refusal, _) in self._avoided.items():
            entry = plan.find(ref.id).with_refusal(ref.version, refusal)
            plan = plan.model_copy(update={"models": {**plan.models, ref.id: entry}})
        self._current = plan
        self._changes_s = min((one.ends_s for one in self._avoided.values()), default=inf)

    def reload(self) -> None:
        """Read the file now; keep the last valid plan if the file is invalid or missing."""
        try:
            plan = read_plan(self._store)
        except PlanUnusable as error:
            self._file.recheck_after(error)
            log.error("plan %d stays in use: %s", self._plan.number, error.message)
            return
        if plan.number == 0 and self._plan.number:
            log.error("plan %d stays in use: its file is gone", self._plan.number)
            return
        log.info("plan %d replaces plan %d", plan.number, self._plan.number)
        self._plan = plan
        self._update()
