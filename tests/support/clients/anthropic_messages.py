"""Program that makes one call of Anthropic's own client.

python anthropic_messages.py URL METHOD '{"messages": ..., ...}'

Prints the answer as JSON: a message, a list of events (`events`), a message that the client has
collected from a stream (`stream`), a count of tokens, the messages of a conversation with a tool
(`run_tools`), the id of a request (`request_id`), or all models (`models`). Prints
{"raised": class, "type": ..., "code": ...} for an error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
from anthropic import beta_tool
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

KEY = "unused"


def dump(answer: BaseModel, kind: Any) -> Any:
    """Return the answer as JSON. The client itself does not validate answers."""
    fields = answer.model_dump(mode="json")
    TypeAdapter(kind).validate_python(fields)
    return fields


@beta_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}"


def call(client: anthropic.Anthropic, method: str, arguments: dict[str, Any]) -> Any:
    if method == "count_tokens":
        return dump(client.messages.count_tokens(**arguments), MessageTokensCount)
    if method == "events":
        with client.messages.create(**arguments, stream=True) as events:
            return [dump(event, RawMessageStreamEvent) for event in events]
    if method == "stream":
        with client.messages.stream(**arguments) as stream:
            text = "".join(stream.text_stream)
            return {"text": text, "message": dump(stream.get_final_message(), Message)}
    if method == "run_tools":
        runner = client.beta.messages.tool_runner(**arguments, tools=[weather])
        return [message.model_dump(mode="json") for message in runner]
    if method == "request_id":
        return client.messages.create(**arguments)._request_id
    if method == "models":
        return [dump(model, ModelInfo) for model in client.models.list(**arguments)]
    return dump(client.messages.create(**arguments), Message)


def main(url: str, method: str, arguments: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=60)
    try:
        result = call(client, method, json.loads(arguments))
    except anthropic.APIStatusError as error:
        result = {"raised": type(error).__name__, "type": error.type, "code": error.error_code}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
