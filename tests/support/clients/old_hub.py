"""Program that makes one call of huggingface_hub 0.25.

HF_INFERENCE_ENDPOINT=URL python old_hub.py METHOD '{"model": ..., ...}' [BASE_URL]

The environment or BASE_URL names the server. Prints the return value of the method, or
{"raised": class, "message": ...}, as JSON.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from huggingface_hub import InferenceClient
from huggingface_hub.utils import HfHubHTTPError


def main(method: str, arguments: str, base_url: str | None = None) -> None:
    client = InferenceClient(base_url=base_url, timeout=60)
    try:
        answer = getattr(client, method)(**json.loads(arguments))
    except HfHubHTTPError as error:
        answer = {"raised": type(error).__name__, "message": str(error)}
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    elif method == "get_model_status":
        answer = vars(answer)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
