"""Request bodies and responses of the tokenizer. Unknown keys are ignored."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

# pydantic rejects typing.TypedDict before Python 3.12.
from typing_extensions import TypedDict

from deployments.ingress.apis.openai.schemas import ChatBody
from deployments.ingress.apis.shared.unsupported_fields import UnsupportedFields
from deployments.ingress.http.api import LENIENT
from deployments.ingress.http.request_fields import RawOptions
from deployments.ingress.token_ids import IdsOrMany, TokenIdList
from deployments.ingress.tokenization_service import TokenizedText
from deployments.tasks.inputs import NonEmptyText, one_or_many


class TokenizeBody(BaseModel):
    """Body of `/tokenize` of text-embeddings-inference."""

    model_config = LENIENT

    inputs: one_or_many(NonEmptyText)  # type: ignore[valid-type]  # built by a function
    add_special_tokens: bool | None = None  # default: true
    prompt_name: str | None = None
    model: str | None = None
    options: RawOptions = None


class PromptTokenizeBody(BaseModel):
    """Body of `/tokenize` of vLLM, for a text as `/v1/completions` reads it."""

    model_config = LENIENT

    prompt: NonEmptyText
    add_special_tokens: bool | None = None  # default: true
    return_token_strs: Any = None  # rejected, unless it has no effect
    model: str | None = None
    options: RawOptions = None


class ChatTokenizeBody(ChatBody):
    """Body of `/tokenize` of vLLM, for a conversation as `/v1/chat/completions` reads it."""

    add_special_tokens: Any = None  # rejected, unless it has no effect
    return_token_strs: Any = None


UNSUPPORTED_TOKENIZE_FIELDS: UnsupportedFields = {
    "return_token_strs": ((False,), "send `inputs` in place of `prompt` for the text of each token")
}
UNSUPPORTED_CHAT_TOKENIZE_FIELDS: UnsupportedFields = {
    **UNSUPPORTED_TOKENIZE_FIELDS,
    "add_special_tokens": ((False,), "the chat template writes the special tokens"),
}


class DecodeBody(BaseModel):
    """Body of `/decode` of text-embeddings-inference: token ids of one or several texts."""

    model_config = LENIENT

    ids: IdsOrMany
    skip_special_tokens: bool | None = None  # default: true
    model: str | None = None
    options: RawOptions = None


class DetokenizeBody(BaseModel):
    """Body of `/detokenize` of vLLM."""

    model_config = LENIENT

    tokens: TokenIdList
    model: str | None = None
    options: RawOptions = None


class SimpleToken(TypedDict):
    """A token. `start` and `stop` are character offsets, null for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokenizedPrompt(TypedDict):
    """The token ids of a prompt, as vLLM returns them."""

    count: int
    max_model_len: int  # tokens of prompt and answer
    tokens: list[int]
    token_strs: None


class DetokenizedPrompt(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    """What clients read from `/tokenizer_info` of vLLM. null: the model has no such token."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


def build_simple_tokens(tokenized: TokenizedText) -> list[SimpleToken]:
    special = tokenized.tokens.special
    rows = zip(tokenized.tokens.ids.tolist(), tokenized.tokens.offsets.tolist(), strict=True)
    return [
        {"id": token_id, "text": special[i], "special": True, "start": None, "stop": None}
        if i in special
        else {
            "id": token_id,
            "text": tokenized.text[start:stop],
            "special": False,
            "start": start,
            "stop": stop,
        }
        for i, (token_id, (start, stop)) in enumerate(rows)
    ]
