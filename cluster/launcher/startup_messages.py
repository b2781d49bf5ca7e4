"""What `hundredfold serve` reports once the server answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.access import find_key_file
from cluster.config_entries import find_store, read_args, read_mapping
from cluster.launcher.launched_config import LOOPBACK_BY_WILDCARD
from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.store import LATEST_NAME, model_directory, resolve_version
from deployments.errors import ArtifactError, ArtifactMissing
from deployments.tasks import TASKS

# For generative models, and those whose task is unknown.
_ANY_EXAMPLE = '{"inputs": "Hello world"}'


def startup_messages(
    url: str, config: dict[str, Any], grpc_port: int | None = None
) -> Iterator[str]:
    """Yield a line with the models that are not built, then one with the URL and an example.

    The example is a request to the first model that is built. Without one, it lists the models of
    the store.
    """
    models = {
        model["id"]: _find_example(find_store(args), model)
        for args in read_args(config)
        for model in args.get("models") or ()
    }
    if missing := [f"`{name}`" for name, body in models.items() if body is None]:
        yield f"not built yet: {', '.join(missing)}"
    key = "" if find_key_file(config) is None else ' -H "Authorization: Bearer $KEY"'
    examples = (f"/{name} -d '{body}'" for name, body in models.items() if body is not None)
    example = next(examples, "")
    # The certificate names the host as clients call it, not its address.
    insecure = " --insecure" if url.startswith("https:") else ""
    is_open = read_mapping(config, "http_options").get("host") in LOOPBACK_BY_WILDCARD
    where = f"{url} and all other addresses of this host" if is_open else url
    where += "" if grpc_port is None else f", gRPC on port {grpc_port}"
    yield f"serving on {where} - try: curl{insecure}{key} {url}/models{example}"


def _find_example(store: Path, model: Mapping[str, Any]) -> str | None:
    """Return the body of a request to the model, for its own task; None if it is not built.

    A model that cannot be read is reported elsewhere.
    """
    try:
        version = resolve_version(store, model["id"], model.get("version") or LATEST_NAME)
    except ArtifactMissing:
        return None
    except ArtifactError:
        return _ANY_EXAMPLE
    try:
        manifest = ArtifactManifest.parse(model_directory(store, model["id"]) / version)
    except ArtifactError:
        return _ANY_EXAMPLE
    task = TASKS.get(manifest.tasks[0])
    return _ANY_EXAMPLE if task is None else json.dumps(task.example)
