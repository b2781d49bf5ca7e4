"""What `hundredfold serve` reports once the server answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.access import find_key_file
from cluster.config_entries import find_store, read_args, read_mapping
from cluster.launcher.launched_config import LOOPBACK_BY_WILDCARD
from deployments.artifacts.store import LATEST_NAME, resolve_version
from deployments.errors import ArtifactError, ArtifactMissing


def startup_messages(
    url: str, config: dict[str, Any], grpc_port: int | None = None
) -> Iterator[str]:
    """Yield a line with the models that are not built, then one with the URL and an example.

    The example is a request to the first model that is built. Without one, it lists the models of
    the store.
    """
    models = {
        model["id"]: _is_built(find_store(args), model)
        for args in read_args(config)
        for model in args.get("models") or ()
    }
    built = [name for name, is_built in models.items() if is_built]
    if missing := [f"`{name}`" for name, is_built in models.items() if not is_built]:
        yield f"not built yet: {', '.join(missing)}"
    key = "" if find_key_file(config) is None else ' -H "Authorization: Bearer $KEY"'
    body = '{"inputs": "Hello world"}'
    example = f"/{built[0]} -d '{body}'" if built else ""
    # The certificate names the host as clients call it, not its address.
    insecure = " --insecure" if url.startswith("https:") else ""
    is_open = read_mapping(config, "http_options").get("host") in LOOPBACK_BY_WILDCARD
    where = f"{url} and all other addresses of this host" if is_open else url
    where += "" if grpc_port is None else f", gRPC on port {grpc_port}"
    yield f"serving on {where} - try: curl{insecure}{key} {url}/models{example}"


def _is_built(store: Path, model: Mapping[str, Any]) -> bool:
    """Return whether the store has the model. One that cannot be read is reported elsewhere."""
    try:
        resolve_version(store, model["id"], model.get("version") or LATEST_NAME)
    except ArtifactMissing:
        return False
    except ArtifactError:
        pass
    return True
