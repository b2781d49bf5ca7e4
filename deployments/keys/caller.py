"""The caller of a request: the permissions and limits of its key."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from fnmatch import translate

from deployments.errors import Forbidden
from deployments.keys.key import ANY_MODEL, Scope
from deployments.keys.limits import KeyMeter


class Caller:
    """The permissions and limits of one key. All requests with the key share the object.

    `models` are patterns such as `org/*`. `meter` counts requests and tokens; None: no limits.
    """

    __slots__ = ("_models", "meter", "name", "scopes")

    def __init__(
        self,
        name: str,
        scopes: Iterable[Scope] = Scope,
        models: Iterable[str] = (ANY_MODEL,),
        meter: KeyMeter | None = None,
    ) -> None:
        self.name = name
        self.meter = meter
        self.scopes = frozenset(scopes)
        patterns = tuple(models)
        self._models = (
            None
            if ANY_MODEL in patterns
            else re.compile("|".join(f"(?:{translate(pattern)})" for pattern in patterns))
        )

    def may_use_model(self, model_id: str) -> bool:
        return self._models is None or self._models.match(model_id) is not None

    def require_model(self, model_id: str) -> None:
        """Raise Forbidden if the key does not permit the model, even if no such model exists."""
        if not self.may_use_model(model_id):
            raise Forbidden(f"the key `{self.name}` does not permit the model {model_id}")

    def require_scope(self, *alternatives: Scope) -> None:
        """Raise Forbidden unless the key has one of these scopes."""
        if self.scopes.isdisjoint(alternatives):
            raise Forbidden(
                f"the key `{self.name}` lacks the scope `{alternatives[0]}`. It has: "
                f"{', '.join(sorted(self.scopes))}"
            )


# Without configured keys every caller may use everything.
UNRESTRICTED = Caller("")

# The asyncio task that handles a request sets this context variable, and child tasks inherit it. A
# parameter would pass through every API, although only model selection, limits and records read it.
_CURRENT: ContextVar[Caller] = ContextVar("caller", default=UNRESTRICTED)


def current_caller() -> Caller:
    """Return the caller of the request that this task handles; UNRESTRICTED without keys."""
    return _CURRENT.get()


def set_current_caller(caller: Caller) -> None:
    _CURRENT.set(caller)
