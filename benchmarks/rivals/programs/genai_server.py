"""Server for `/v1/completions` with FastAPI and onnxruntime-genai, one generation at a time.

onnxruntime-genai supports continuous batching on CUDA only, and its generator is not thread-safe.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

import onnxruntime_genai
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class CompletionRequest(BaseModel):
    """Body of a completion request. The server ignores all other fields."""

    prompt: str
    max_tokens: int = 16


class GenaiModel:
    """Generative model that completes one prompt at a time."""

    def __init__(self, model: Path) -> None:
        self._model = onnxruntime_genai.Model(str(model))
        self._tokenizer = onnxruntime_genai.Tokenizer(self._model)
        self._lock = threading.Lock()

    def complete(self, prompt: str, max_tokens: int) -> tuple[str, int]:
        """Decode greedily. Return the new text and its number of tokens."""
        ids = self._tokenizer.encode(prompt)
        with self._lock:
            parameters = onnxruntime_genai.GeneratorParams(self._model)
            parameters.set_search_options(do_sample=False, max_length=len(ids) + max_tokens)
            generator = onnxruntime_genai.Generator(self._model, parameters)
            generator.append_tokens(ids)
            while not generator.is_done():
                generator.generate_next_token()
            new = generator.get_sequence(0)[len(ids) :]
        return self._tokenizer.decode(new), len(new)


def build_app(generator: GenaiModel) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/v1/completions")
    def complete(request: CompletionRequest) -> dict[str, Any]:
        text, tokens = generator.complete(request.prompt, request.max_tokens)
        return {"choices": [{"text": text}], "usage": {"completion_tokens": tokens}}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    uvicorn.run(
        build_app(GenaiModel(options.model)),
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
    )
