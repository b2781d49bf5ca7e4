"""Bodies of other chat dialects, translated into bodies of OpenAI's chat and parsed as such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deployments.ingress.apis.openai.requests import field_names, parse_chat_request
from deployments.ingress.apis.openai.schemas import ChatBody
from deployments.ingress.http.api import parse_body
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.requests import GenerationRequest
from deployments.registry import RegisteredModel


class TranslatedChat(NamedTuple):
    """A body of another dialect as a chat."""

    chat: ChatBody
    request: GenerationRequest
    field_names: Mapping[str, str]  # names in the body of what errors call by names of the chat


def parse_translated_chat(
    fields: Mapping[str, Any],
    names: Mapping[str, str],
    paths: Sequence[str],
    model: RegisteredModel,
    options: RequestOptions,
) -> TranslatedChat:
    """Parse the fields of a chat that a dialect has built from its body.

    `names` maps fields of the chat to fields of the body. `paths` has where the body has the
    content of each message. Raises InvalidField or EmptyInput with fields of the body.
    """
    in_body = dict(names)
    for index, path in enumerate(paths):
        in_body |= dict.fromkeys((f"messages[{index}].content", f"prompt[{index}].content"), path)
    with rename_error_fields(in_body):
        chat = parse_body(ChatBody, dict(fields))
        request = parse_chat_request(chat, model, options)
    renamed = {field: in_body.get(name, name) for field, name in field_names(chat).items()}
    return TranslatedChat(chat, request, in_body | renamed)
