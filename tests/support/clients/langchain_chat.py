"""Program that calls LangChain's chat model over OpenAI's API.

python langchain_chat.py URL '{"model": ..., "temperature": ...}' TEXT

Prints {"whole": text, "streamed": [part, ...]} as JSON.
"""

from __future__ import annotations

import json
import sys

from langchain_openai import ChatOpenAI


def main(url: str, settings: str, text: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key="unused", max_retries=0, **json.loads(settings))
    result = {
        "whole": chat.invoke(text).content,
        "streamed": [part.content for part in chat.stream(text)],
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
