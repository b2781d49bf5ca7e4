"""Server that offers an embedding function through FastAPI.

The route function is not a coroutine, so FastAPI runs it in a thread pool. FastAPI's documentation
recommends this for blocking code.
"""

from __future__ import annotations

import uvicorn
from embedders import Embed, open_embedder, parse_arguments
from fastapi import FastAPI
from pydantic import BaseModel


class EmbedRequest(BaseModel):
    """Body of `POST /embed`: one text or several."""

    inputs: str | list[str]


def build_app(embed: Embed) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/embed")
    def embed_texts(request: EmbedRequest) -> list[list[float]]:
        texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
        vectors: list[list[float]] = embed(texts).tolist()
        return vectors

    return app


if __name__ == "__main__":
    arguments = parse_arguments()
    embedder = open_embedder(arguments.engine, arguments.model, arguments.tokenizer)
    uvicorn.run(build_app(embedder), host="127.0.0.1", port=arguments.port, log_level="warning")
