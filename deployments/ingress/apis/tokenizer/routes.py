"""Routes of the tokenizer.

POST /tokenize  /models/{id}/tokenize      `inputs`: response of text-embeddings-inference (TEI)
                                           `prompt` or `messages`: response of vLLM
POST /decode  /models/{id}/decode          TEI
POST /detokenize  /models/{id}/detokenize  vLLM
GET  /tokenizer_info  /models/{id}/tokenizer_info  vLLM

Without a model, TEI's forms are those of the first configured model, and vLLM's forms those of the
first that generates text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME
from deployments.ingress.apis.openai.routes import parse_chat
from deployments.ingress.apis.shared.context import ApiContext
from deployments.ingress.apis.shared.generation_answers import ParsedGeneration, tokenize_chat
from deployments.ingress.apis.shared.inference_requests import (
    InferenceBody,
    build_inference_request,
)
from deployments.ingress.apis.shared.tei_responses import TEI_ERROR_FORMAT
from deployments.ingress.apis.shared.unsupported_fields import reject_unsupported_fields
from deployments.ingress.apis.tokenizer.schemas import (
    UNSUPPORTED_CHAT_TOKENIZE_FIELDS,
    UNSUPPORTED_TOKENIZE_FIELDS,
    ChatTokenizeBody,
    DecodeBody,
    DetokenizeBody,
    DetokenizedPrompt,
    PromptTokenizeBody,
    SimpleToken,
    TokenizeBody,
    TokenizedPrompt,
    TokenizerInfo,
    build_simple_tokens,
)
from deployments.ingress.http.api import Access, Operation, build_schema, parse_body
from deployments.ingress.http.bodies import json_response, read_json_object
from deployments.ingress.http.errors import rename_error_fields
from deployments.ingress.http.request_fields import read_model_name
from deployments.ingress.request_options import RequestOptions
from deployments.ingress.requests import InferenceRequest
from deployments.ingress.token_ids import build_token_id_inputs
from deployments.registry import RegisteredModel

# Fields of an InferenceRequest and their names in the body, for errors.
TEI_FIELDS = {"parameters.": ""}
PROMPT_FIELDS = {"inputs": "prompt"}


class TokenizerRoutes:
    """Handlers of the tokenizer's routes."""

    name: ClassVar = "Tokenizer"
    error_format: ClassVar = TEI_ERROR_FORMAT

    def __init__(self, context: ApiContext) -> None:
        self._pipeline = context.pipeline

    def operations(self) -> Sequence[Operation]:
        """Return the operations.

        `app.py` lists them before the Hugging Face API, whose model paths also match these paths.
        """
        bodies = (TokenizeBody, PromptTokenizeBody, ChatTokenizeBody)
        return (
            Operation(
                method="POST",
                paths=_paths("tokenize"),
                handler=self.tokenize,
                summary="Tokenize texts, a prompt or a conversation",
                access=Access.INFER,
                body={"anyOf": list(map(build_schema, bodies))},
                response={
                    "anyOf": [build_schema(list[list[SimpleToken]]), build_schema(TokenizedPrompt)]
                },
                examples={
                    "one text": {"inputs": "A kitten."},
                    "a prompt": {"prompt": "A kitten."},
                    "a conversation": {"messages": [{"role": "user", "content": "Hello"}]},
                },
                runs_model=True,
            ),
            Operation(
                method="POST",
                paths=_paths("decode"),
                handler=self.decode,
                summary="Decode token ids of several texts",
                access=Access.INFER,
                body=build_schema(DecodeBody),
                response=build_schema(list[str]),
                examples={"one sequence": {"ids": [101, 1037, 18401, 1012, 102]}},
                runs_model=True,
            ),
            Operation(
                method="POST",
                paths=_paths("detokenize"),
                handler=self.detokenize,
                summary="Decode token ids of a prompt",
                access=Access.INFER,
                body=build_schema(DetokenizeBody),
                response=build_schema(DetokenizedPrompt),
                examples={"one sequence": {"tokens": [504, 2644]}},
                runs_model=True,
            ),
            Operation(
                method="GET",
                paths=_paths("tokenizer_info"),
                handler=self.describe,
                summary="Special tokens and chat template of a model",
                access=Access.INFER,
                response=build_schema(TokenizerInfo),
            ),
        )

    async def tokenize(self, request: Request) -> Response:
        """Return a list per text for `inputs`, else the ids of `prompt` or `messages`."""
        raw = await read_json_object(request, self._pipeline.settings.limits)
        if "inputs" not in raw and "messages" in raw:
            return await self._tokenize_chat(request)
        if "inputs" not in raw and "prompt" in raw:
            return await self._tokenize_prompt(request, parse_body(PromptTokenizeBody, raw))
        return await self._tokenize_texts(request, parse_body(TokenizeBody, raw))

    async def _tokenize_texts(self, request: Request, body: TokenizeBody) -> Response:
        inference_request = build_inference_request(
            request, body, body.inputs, parameters={"prompt_name": body.prompt_name}
        )
        with rename_error_fields(TEI_FIELDS):
            tokenized = await self._pipeline.tokenize(
                inference_request, special=body.add_special_tokens is not False
            )
        # Use a thread: building 100,000 tokens takes tenths of a second.
        return json_response(
            await asyncio.to_thread(lambda: list(map(build_simple_tokens, tokenized)))
        )

    async def _tokenize_prompt(self, request: Request, body: PromptTokenizeBody) -> Response:
        reject_unsupported_fields(body, UNSUPPORTED_TOKENIZE_FIELDS)
        model = self._find_model(read_model_name(request, body.model))
        with rename_error_fields(PROMPT_FIELDS):
            (tokenized,) = await self._pipeline.tokenize(
                _build_request(request, body, body.prompt, model),
                special=body.add_special_tokens is not False,
            )
        return self._answer(tokenized.tokens.ids.tolist(), model)

    async def _tokenize_chat(self, request: Request) -> Response:
        chat = await tokenize_chat(self._pipeline, request, ChatTokenizeBody, _parse_chat)
        return self._answer(chat.ids, chat.model)

    def _answer(self, tokens: Sequence[int], model: RegisteredModel) -> Response:
        return json_response(
            TokenizedPrompt(
                count=len(tokens),
                max_model_len=self._pipeline.monitor.find_context_tokens(model),
                tokens=list(tokens),
                token_strs=None,
            )
        )

    async def decode(self, request: Request) -> Response:
        raw = await read_json_object(request, self._pipeline.settings.limits)
        body = parse_body(DecodeBody, raw)
        inputs = build_token_id_inputs(body.ids, path="ids")
        skip = body.skip_special_tokens is not False
        decoded = await self._pipeline.decode(
            build_inference_request(request, body, inputs), skip_special=skip
        )
        return json_response(decoded)

    async def detokenize(self, request: Request) -> Response:
        raw = await read_json_object(request, self._pipeline.settings.limits)
        body = parse_body(DetokenizeBody, raw)
        inputs = build_token_id_inputs(body.tokens, path="tokens")
        model = self._find_model(read_model_name(request, body.model))
        (prompt,) = await self._pipeline.decode(
            _build_request(request, body, inputs, model), skip_special=False
        )
        return json_response(DetokenizedPrompt(prompt=prompt))

    async def describe(self, request: Request) -> Response:
        name = read_model_name(request, request.query_params.get("model"))
        model = self._find_model(name)
        config = model.manifest.generation_config
        special: Mapping[str, str] = {} if config is None else config.special_tokens
        return json_response(
            TokenizerInfo(
                tokenizer_class="PreTrainedTokenizerFast",
                model_max_length=self._pipeline.monitor.find_context_tokens(model),
                bos_token=special.get("bos_token"),
                eos_token=special.get("eos_token"),
                pad_token=special.get("pad_token"),
                unk_token=special.get("unk_token"),
                chat_template=await asyncio.to_thread(_read_chat_template, model),
            )
        )

    def _find_model(self, name: str | None) -> RegisteredModel:
        """Return the named model, else the first that generates text, else the first of all."""
        if name is not None:
            return self._pipeline.permitted.find(name)
        resolver = self._pipeline.resolver
        if any(model.is_generative for model in self._pipeline.permitted.open_models()):
            return resolver.find_generator(None)
        return resolver.select(InferenceRequest(inputs=None)).model


def _paths(name: str) -> tuple[str, str]:
    return f"/{name}", f"/models/{{id:path}}/{name}"


def _build_request(
    request: Request, body: InferenceBody, inputs: Any, model: RegisteredModel
) -> InferenceRequest:
    """Build a request for the name that the client sent, else for `model`."""
    built = build_inference_request(request, body, inputs)
    return replace(built, model_id=built.model_id or model.ref.id)


def _parse_chat(
    body: ChatTokenizeBody, model: RegisteredModel, options: RequestOptions
) -> ParsedGeneration:
    reject_unsupported_fields(body, UNSUPPORTED_CHAT_TOKENIZE_FIELDS)
    return parse_chat(body, model, options)


def _read_chat_template(model: RegisteredModel) -> str | None:
    if CHAT_TEMPLATE_NAME not in model.manifest.files:
        return None
    return (model.directory / CHAT_TEMPLATE_NAME).read_text(encoding="utf-8")
