"""Program that makes one call of text-generation-inference's own client.

python tgi.py URL METHOD '{"prompt": ..., ...}'

Prints the return value of the method, or {"raised": class, "message": ...}, as JSON. A stream is
printed as a list.
"""

from __future__ import annotations

import json
import sys

from text_generation import Client
from text_generation.errors import (
    GenerationError,
    IncompleteGenerationError,
    NotFoundError,
    OverloadedError,
    ValidationError,
)

ERRORS = (
    GenerationError,
    IncompleteGenerationError,
    NotFoundError,
    OverloadedError,
    ValidationError,
)


def main(url: str, method: str, arguments: str) -> None:
    call = getattr(Client(url, timeout=60), method)
    try:
        answer = call(**json.loads(arguments))
        if method == "generate_stream":
            result = [one.model_dump() for one in answer]
        else:
            result = answer.model_dump()
    except ERRORS as error:
        result = {"raised": type(error).__name__, "message": str(error)}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
