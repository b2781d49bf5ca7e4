"""Descriptions of models, shared by the APIs that list them."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.types import Device
from deployments.builds.sources import hide_directory
from deployments.errors import InvalidField, ServeError
from deployments.ingress.devices.cluster_state import ClusterMonitor
from deployments.ingress.pipeline import RequestPipeline
from deployments.keys.caller import current_caller
from deployments.management.listing import list_default_versions
from deployments.registry import RegisteredModel

# Also the default, because OpenAI's client reads one page only. `limit` in the query replaces it.
MAX_PAGE_MODELS = 1_000


class ModelPage(NamedTuple):
    """A part of the list of models."""

    models: list[dict[str, Any]]
    has_more: bool


async def build_model_list(
    pipeline: RequestPipeline, store: Path, query: Mapping[str, str]
) -> dict[str, Any]:
    """Build one page of the models that the caller may use, as OpenAI's list object.

    In the query, `limit` is the length of the page. `after` is the last model id of the previous
    page. Raises InvalidField for an invalid `limit`.
    """
    page = await describe_page(pipeline, store, parse_limit(query), after=query.get("after"))
    return build_openai_page(page)


def build_openai_page(page: ModelPage) -> dict[str, Any]:
    return {"object": "list", "data": page.models, "has_more": page.has_more}


async def describe_page(
    pipeline: RequestPipeline,
    store: Path,
    limit: int,
    *,
    after: str | None = None,
    before: str | None = None,
) -> ModelPage:
    """Describe the first models after the id `after`, or the last ones before the id `before`.

    Usable models of the configuration come first, then its names, then its rejected models, then
    the other models of the store by id. Of this last part, only the manifests of models on the page
    are read.
    """
    configured = [model.ref.id for model in pipeline.permitted.open_models()]
    named = pipeline.permitted.list_names()
    first = list(dict.fromkeys([*configured, *named, *pipeline.permitted.rejected()]))
    may_use, known = current_caller().may_use_model, set(first)
    stored = await asyncio.to_thread(list_default_versions, store)
    # The store lists models by directory name, which has `--` for the `/` of an id. Sort by id.
    rest = sorted(model_id for model_id in stored if model_id not in known and may_use(model_id))
    names = [*first, *rest]
    start, end = 0, len(names)
    if after is not None:
        in_rest = len(first) + bisect_right(rest, after)
        start = first.index(after) + 1 if after in known else in_rest
    if before is not None:
        end = first.index(before) if before in known else len(first) + bisect_left(rest, before)
    between = names[start:end]
    models = []
    for model_id in between[:limit] if before is None else between[-limit:]:
        await asyncio.sleep(0)  # lets other requests run before the next manifest is read
        models.append(describe_model(pipeline, model_id))
    return ModelPage(models, has_more=len(between) > limit)


def parse_limit(query: Mapping[str, str], default: int = MAX_PAGE_MODELS) -> int:
    text = query.get("limit", str(default))
    # Check the length first: int() raises for thousands of digits.
    is_short_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_PAGE_MODELS))
    if not (is_short_number and 1 <= int(text) <= MAX_PAGE_MODELS):
        raise InvalidField(f"`limit` must be an integer from 1 to {MAX_PAGE_MODELS}", field="limit")
    return int(text)


def list_configured(pipeline: RequestPipeline) -> list[dict[str, Any]]:
    """Describe the models of the configuration. Rejected models come last."""
    configured = (model.ref.id for model in pipeline.permitted.open_models())
    names = [*configured, *pipeline.permitted.rejected()]
    return [describe_model(pipeline, model_id) for model_id in names]


def describe_model(pipeline: RequestPipeline, model_id: str) -> dict[str, Any]:
    """Build the object of a model in a list, with the reason if the model cannot be used.

    The object of a name of the configuration has that name as `id`, and the model's id as `root`.
    """
    try:
        facts = build_model_facts(pipeline.permitted.find(model_id), pipeline.monitor)
        is_name = model_id in pipeline.permitted.list_names()
        return facts | {"id": model_id, "root": facts["id"]} if is_name else facts
    except ServeError as error:
        return {
            "id": model_id,
            "object": "model",
            "created": 0,
            "owned_by": owner(model_id),
            "state": "refused",
            "reason": error.message,
        }


async def build_short_path_list(
    pipeline: RequestPipeline, store: Path, query: Mapping[str, str]
) -> dict[str, Any]:
    """Build the list for `GET /models`, which Infinity's client also reads.

    Infinity's client requires `stats`. It rejects every value of `owned_by` except Infinity's own.
    This list therefore has no `owned_by`.
    """
    model_list = await build_model_list(pipeline, store, query)
    models = [
        {key: value for key, value in model.items() if key != "owned_by"} | {"stats": {}}
        for model in model_list["data"]
    ]
    return {**model_list, "data": models}


def build_version_facts(model: RegisteredModel, monitor: ClusterMonitor) -> dict[str, Any]:
    """Build the facts that differ between versions.

    `pruned` is the fraction of pruned attention heads and feed-forward channels, or null.
    """
    manifest = model.manifest
    states = monitor.states_for(model)
    devices = {
        device.value: {
            "compute_type": f"{device}-{candidate.precision}",
            "candidate": candidate.name,
            "precision": candidate.precision,
            "available": device in states and states[device].available,
            "replicas": states[device].running if device in states else 0,
            "size_bytes": manifest.count_bytes(candidate),
        }
        for device in Device
        if (candidate := manifest.candidate_for(device)) is not None
    }
    pruning = manifest.source.pruning
    return {
        "version": model.ref.version,
        "size_bytes": sum(sealed.size for sealed in manifest.files.values()),
        "pruned": pruning.fraction if pruning else None,
        "devices": devices,
    }


def build_model_facts(model: RegisteredModel, monitor: ClusterMonitor) -> dict[str, Any]:
    """Build OpenAI's model object, extended by facts of this server."""
    manifest = model.manifest
    config = manifest.generation_config and manifest.generation_config.encoder_decoder
    return {
        "id": model.ref.id,
        "object": "model",
        "created": model.sealed_ns // 10**9,
        "owned_by": owner(model.ref.id),
        "state": "ready" if is_loaded(model, monitor) else "loading",
        "tasks": model.tasks,
        "max_tokens": manifest.max_tokens,
        "max_model_len": monitor.find_context_tokens(model),  # vLLM's name
        "width": manifest.default_dimensions or manifest.output_width,
        "similarity": manifest.similarity if manifest.pooling else None,
        "labels": list(manifest.labels),
        "languages": sorted(config.languages) if config else [],
        "source": describe_source(manifest.source),
        **build_version_facts(model, monitor),
    }


def describe_source(source: ModelSource) -> dict[str, Any]:
    """Describe the origin of the weights, without directories of the host of the build."""
    return {**source.model_dump(), "ref": hide_directory(source.ref)}


def is_loaded(model: RegisteredModel, monitor: ClusterMonitor) -> bool:
    return bool(running_devices(model, monitor))


def running_devices(model: RegisteredModel, monitor: ClusterMonitor) -> list[Device]:
    """Return the devices that have a running replica and a graph of the model.

    The replica may not have loaded the model yet.
    """
    return [
        device
        for device, state in monitor.states_for(model).items()
        if state.running and model.manifest.candidate_for(device) is not None
    ]


def owner(model_id: str) -> str:
    """Return the organization in a model id, else the name of this server."""
    return model_id.partition("/")[0] if "/" in model_id else "hundredfold"
