"""Program that calls Cohere's client.

python cohere_client.py URL CLASS METHOD '{"model": ..., "query": ..., "documents": [...]}'

`CLASS` is Client for version 1 of the API, ClientV2 for version 2. Prints the parsed answer, or
{"raised": class, "status": ..., "message": ...}, as JSON.
"""

from __future__ import annotations

import json
import sys

import cohere
from cohere.core.api_error import ApiError


def main(url: str, class_name: str, method: str, arguments: str) -> None:
    client = getattr(cohere, class_name)(api_key="unused", base_url=url)
    try:
        result = getattr(client, method)(**json.loads(arguments)).model_dump(mode="json")
    except ApiError as error:
        result = {
            "raised": type(error).__name__,
            "status": error.status_code,
            "message": str(error.body),
        }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
