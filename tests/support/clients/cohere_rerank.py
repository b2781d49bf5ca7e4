"""Program that calls `rerank` of cohere's client for API version 2.

python cohere_rerank.py URL '{"model": ..., "query": ..., "documents": [...]}'

Prints the parsed answer, or {"raised": class, "status": ..., "message": ...}, as JSON.
"""

from __future__ import annotations

import json
import sys

import cohere
from cohere.core.api_error import ApiError


def main(url: str, arguments: str) -> None:
    client = cohere.ClientV2(api_key="unused", base_url=url)
    try:
        result = client.rerank(**json.loads(arguments)).model_dump(mode="json")
    except ApiError as error:
        result = {
            "raised": type(error).__name__,
            "status": error.status_code,
            "message": str(error.body),
        }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
