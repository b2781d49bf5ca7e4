"""Ray Serve application for embeddings: one deployment, `@serve.batch`, default settings."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from typing import Any

import ray
from embedders import open_embedder, parse_arguments
from ray import serve
from starlette.requests import Request


@serve.deployment
class Embedder:
    def __init__(self, options: Namespace) -> None:
        self._embed = open_embedder(options.engine, options.model, options.tokenizer)

    async def __call__(self, request: Request) -> Any:
        """Answer a request; `GET` is the health check."""
        if request.method == "GET":
            return "ok"
        inputs = (await request.json())["inputs"]
        return await self._embed_batch([inputs] if isinstance(inputs, str) else inputs)

    @serve.batch
    async def _embed_batch(self, requests: list[list[str]]) -> list[list[list[float]]]:
        vectors = iter(self._embed([text for texts in requests for text in texts]).tolist())
        return [[next(vectors) for _ in texts] for texts in requests]


if __name__ == "__main__":
    arguments = parse_arguments()
    # Start a new cluster on loopback, even if another cluster runs on this machine.
    ray.init(
        address="local", include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False
    )
    serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # Ray's own handler aborts the process
    application = Embedder.bind(arguments)  # type: ignore[attr-defined]
    try:
        serve.run(application, route_prefix="/", blocking=True)
    finally:
        ray.shutdown()
