"""Program that makes one call of infinity_client.

python infinity.py URL CALL '{"input": ..., ...}'

Prints the parsed answer as the client returns it, or {"raised": class, "message": ...}, as JSON.
Calls without a request body take no body argument.
"""

from __future__ import annotations

import json
import sys

from infinity_client import Client
from infinity_client.api.default import classify, embeddings, health, models, rerank
from infinity_client.errors import UnexpectedStatus
from infinity_client.models import ClassifyInput, OpenAIEmbeddingInputText, RerankInput

CALLS = {"models": models, "health": health}
CALLS_WITH_BODY = {
    "embeddings": (embeddings, OpenAIEmbeddingInputText),
    "rerank": (rerank, RerankInput),
    "classify": (classify, ClassifyInput),
}


def main(url: str, call: str, body: str = "") -> None:
    client = Client(base_url=url, raise_on_unexpected_status=True)
    try:
        if call in CALLS:
            answer = CALLS[call].sync(client=client)
        else:
            module, kind = CALLS_WITH_BODY[call]
            answer = module.sync(client=client, body=kind.from_dict(json.loads(body)))
        result = answer.to_dict()
    except UnexpectedStatus as error:
        result = {"raised": type(error).__name__, "message": str(error)}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
