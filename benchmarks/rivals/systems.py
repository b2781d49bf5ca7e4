"""Commands that start the measured servers, and the config of Hundredfold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.local_model import LocalModel
from benchmarks.common.serve_config import ServeConfig
from benchmarks.rivals.apis import Api, completion_api, hugging_face_api
from benchmarks.rivals.catalog import OFFLINE, Rival
from benchmarks.rivals.environments import Environment, current_environment, open_environment
from benchmarks.rivals.materials import Materials
from benchmarks.servers.own_server import PREFERRED_PORT, build_serve_command
from benchmarks.servers.processes import ServerCommand
from cluster.ports import find_free_port

PORT_PLACES = {"port": 8601, "port_2": 8602, "port_3": 8603}  # placeholder -> preferred port


def open_rival_environment(rival: Rival, parent: Path) -> Environment:
    """Return the Python environment of a rival. Install it if it is missing.

    Raises BenchmarkError if the installation fails.
    """
    if rival.environment is None:
        return current_environment()
    return open_environment(rival.environment, parent)


def build_rival_command(
    rival: Rival, environment: Environment, materials: Materials
) -> ServerCommand:
    """Fill the placeholders of a rival's command. Prepare the files that they stand for.

    Raises ServeError if a file cannot be prepared.
    """
    ports = {place: find_free_port(port, PREFERRED_PORT) for place, port in PORT_PLACES.items()}
    own = {"python": str(environment.python), "bin": str(environment.python.parent)}
    own |= {place: str(port) for place, port in ports.items()}
    places = _Places(own, materials)
    return ServerCommand(
        name=rival.name,
        arguments=[word.format_map(places) for word in rival.command],
        port=ports["port"],
        ready_path=rival.ready_path,
        environment=OFFLINE | {k: v.format_map(places) for k, v in rival.variables.items()},
    )


class _Places(dict[str, str]):
    """Values of placeholders by name. A name that `own` lacks is an attribute of `materials`."""

    def __init__(self, own: Mapping[str, str], materials: Materials) -> None:
        super().__init__(own)
        self._materials = materials

    def __missing__(self, place: str) -> str:
        return str(getattr(self._materials, place))


def list_our_apis(model: LocalModel, generator: LocalModel | None) -> list[Api]:
    apis: list[Api] = [hugging_face_api(model.manifest.id)]
    return apis if generator is None else [*apis, completion_api(generator.manifest.id)]


def build_our_command(
    path: Path | None, store: Path, models: Sequence[LocalModel], directory: Path
) -> ServerCommand:
    """Write the config at `path` with only `models` to `directory`. Return the serve command.

    `store` replaces the config's store. All other settings stay. Raise BenchmarkError for a config
    that cannot be read.
    """
    config = ServeConfig.read(path)
    config.select_models(store, {each.manifest.id: each.manifest.version for each in models})
    directory.mkdir()
    return build_serve_command(config.write(directory))
