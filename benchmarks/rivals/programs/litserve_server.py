"""Server that offers an embedding function through LitServe, which batches requests."""

from argparse import Namespace
from typing import Any

import litserve
from embedders import NormalizedVectors, open_embedder, parse_arguments

MAX_BATCH_SIZE = 32  # maximum number of requests per batch
BATCH_TIMEOUT_S = 0.005


class EmbeddingServer(litserve.LitAPI):
    """LitServe API with the request and response bodies of `fastapi_server.py`."""

    def __init__(self, options: Namespace) -> None:
        super().__init__(
            max_batch_size=MAX_BATCH_SIZE, batch_timeout=BATCH_TIMEOUT_S, api_path="/embed"
        )
        self._options = options

    def setup(self, device: str) -> None:
        """Open the model. LitServe calls this method in the worker process."""
        options = self._options
        self._embed = open_embedder(options.engine, options.model, options.tokenizer)

    def decode_request(self, request: dict[str, Any]) -> list[str]:
        inputs = request["inputs"]
        return [inputs] if isinstance(inputs, str) else inputs

    def predict(self, requests: list[list[str]]) -> list[NormalizedVectors]:
        """Embed the texts of all requests of a batch together."""
        vectors = iter(self._embed([text for texts in requests for text in texts]))
        return [[next(vectors) for _ in texts] for texts in requests]

    def encode_response(self, output: NormalizedVectors) -> list[list[float]]:
        return [vector.tolist() for vector in output]


if __name__ == "__main__":
    arguments = parse_arguments()
    server = litserve.LitServer(EmbeddingServer(arguments), accelerator="cpu")
    server.run(
        host="127.0.0.1", port=arguments.port, generate_client_file=False, log_level="warning"
    )
