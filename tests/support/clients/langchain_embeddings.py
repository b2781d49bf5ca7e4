"""Program that calls LangChain's embeddings over OpenAI's API.

python langchain_embeddings.py URL '{"model": ...}' '["text", ...]'

Prints {"documents": [vector, ...], "query": vector of the first text} as JSON.
"""

from __future__ import annotations

import json
import sys

from langchain_openai import OpenAIEmbeddings


def main(url: str, settings: str, texts: str) -> None:
    embeddings = OpenAIEmbeddings(base_url=url, api_key="unused", **json.loads(settings))
    given = json.loads(texts)
    result = {
        "documents": embeddings.embed_documents(given),
        "query": embeddings.embed_query(given[0]),
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
