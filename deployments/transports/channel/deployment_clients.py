"""Clients over channels. Without a channel they fall back to clients over Ray Serve handles.

The fallback also makes Serve start a replica of a deployment that has none: autoscaling counts the
calls that wait in a handle.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

from deployments.deadlines import deadline_after
from deployments.errors import EngineFailed, ReplicasSilent, ServeError
from deployments.messages import (
    CHARACTERS_PER_TOKEN,
    CallBatch,
    Chunk,
    Completion,
    DecodeRequest,
    GenerationCall,
    GenerationOptions,
    ModelRef,
    PoolRequest,
    PoolState,
    Started,
    TextTokens,
    TokenizeRequest,
    count_characters,
    estimate_prompt_tokens,
)
from deployments.transports.base import Deliver, EncoderClient, GeneratorClient, TokenizerClient
from deployments.transports.channel import codec
from deployments.transports.channel.client_connection import ChannelRequest
from deployments.transports.channel.frames import Buffer, ChannelError, Method
from deployments.transports.channel.replica_connections import NoChannel, ReplicaConnections

T = TypeVar("T")


# Up to this number of characters, an idle encoder tokenizes a batch itself. This takes less time
# than a hop to the tokenizer.
LONE_CALL_CHARACTERS = 1_000
# Assumed tokens of an answer whose `max_new_tokens` is higher or missing. Few answers have more
# tokens.
LONG_ANSWER_TOKENS = 512
# Maximum number of beams in the cost of a call. A replica refuses a call with more beams than KV
# slots. Without this maximum, such a call would use all the credit of its channel until it is
# refused.
MAX_BEAMS = 64
LOAD_TIMEOUT_S = 120.0  # for a micro-batch without calls, which only loads its model


class ChannelEncoderClient:
    """An EncoderClient. It forwards the tokenizer's answer to the encoder without decoding it.

    If an encoder is idle, a short batch goes to the encoder directly, which then tokenizes it. No
    other call waits meanwhile, because the encoder is idle.
    """

    def __init__(
        self, tokenizers: ReplicaConnections, encoders: ReplicaConnections, fallback: EncoderClient
    ) -> None:
        self._tokenizers = tokenizers
        self._encoders = encoders
        self._fallback = fallback

    async def infer(self, batch: CallBatch, deliver: Deliver) -> None:
        try:
            request = await self._build_request(batch)
            async with aclosing(self._encoders.stream(request)) as messages:
                async for message in messages:
                    for index, outcome in _decode(codec.decode_outcomes, message).items():
                        deliver(index, outcome)
        except NoChannel:
            await self._fallback.infer(batch, deliver)

    async def _build_request(self, batch: CallBatch) -> ChannelRequest:
        """Return the request to the encoder, after a hop to the tokenizer if needed.

        If no tokenizer answers but an encoder is connected, the encoder tokenizes every call.
        """
        if batch.calls:
            deadline_s = max(call.deadline_s for call in batch.calls)
        else:
            deadline_s = deadline_after(LOAD_TIMEOUT_S)
        characters = sum(count_characters(text) for call in batch.calls for text in call.texts)
        message = codec.encode_call_batch(batch, deadline_s)
        model = batch.key.model.name
        direct = ChannelRequest(
            Method.TOKENIZE_AND_INFER,
            message,
            -(-characters // CHARACTERS_PER_TOKEN),
            deadline_s,
            is_repeatable=True,
            model=model,
        )
        if characters <= LONE_CALL_CHARACTERS and self._encoders.has_idle_replica(model):
            return direct
        has_encoder = self._encoders.connected > 0
        try:
            tokens = await self._tokenizers.call(
                ChannelRequest(
                    Method.TOKENIZE_BATCH,
                    message,
                    characters,
                    deadline_s,
                    can_wait=not has_encoder,
                    backlog=batch.backlog,
                    model=model,
                )
            )
        except (NoChannel, ReplicasSilent):
            if has_encoder:
                return direct
            raise
        return ChannelRequest(
            Method.INFER,
            tokens.message,
            tokens.cost,
            deadline_s,
            is_repeatable=True,
            backlog=batch.backlog * tokens.cost // max(characters, 1),
            model=model,
        )


class ChannelTokenizerClient:
    """A TokenizerClient over channels. Without any channel, calls use `fallback`."""

    def __init__(self, tokenizers: ReplicaConnections, fallback: TokenizerClient) -> None:
        self._tokenizers = tokenizers
        self._fallback = fallback

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        message = codec.encode_message(request)
        cost = sum(map(len, request.texts))
        call = ChannelRequest(Method.TOKENIZE, message, cost, model=request.model.name)
        try:
            return _decode(codec.decode_text_tokens, (await self._tokenizers.call(call)).message)
        except NoChannel:
            return await self._fallback.tokenize(request)

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        message = codec.encode_message(request)
        cost = sum(map(len, request.sequences))
        call = ChannelRequest(Method.DECODE, message, cost, model=request.model.name)
        try:
            return _decode(codec.decode_texts, (await self._tokenizers.call(call)).message)
        except NoChannel:
            return await self._fallback.decode(request)


class ChannelGeneratorClient:
    """A GeneratorClient over channels. Without any channel, calls use `fallback`."""

    def __init__(self, generators: ReplicaConnections, fallback: GeneratorClient) -> None:
        self._generators = generators
        self._fallback = fallback

    async def complete(self, call: GenerationCall) -> Completion:
        try:
            answer = await self._generators.call(_generation_request(Method.COMPLETE, call))
        except NoChannel:
            return await self._fallback.complete(call)
        return _decode(codec.decode_completion, answer.message)

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        request = _generation_request(Method.STREAM, call)
        try:
            async with aclosing(self._generators.stream(request)) as messages:
                async for message in messages:
                    yield _decode(codec.decode_event, message)
            return
        except NoChannel:
            pass  # raised only before the first event, so the fallback repeats nothing
        async with aclosing(self._fallback.stream(call)) as events:
            async for event in events:
                yield event

    async def tokenize_prompt(self, call: GenerationCall) -> tuple[int, ...]:
        try:
            answer = await self._generators.call(_generation_request(Method.TOKENIZE_PROMPT, call))
        except NoChannel:
            return await self._fallback.tokenize_prompt(call)
        return _decode(codec.decode_token_ids, answer.message)


class ChannelModelPoolClient:
    """A ModelPoolClient over the channels to the replicas of one deployment."""

    def __init__(self, replicas: ReplicaConnections) -> None:
        self._replicas = replicas

    async def send(self, request: PoolRequest) -> Mapping[str, PoolState | ServeError]:
        call = ChannelRequest(Method.MANAGE_POOL, codec.encode_message(request), 0)
        answers = await self._replicas.call_each(call)
        return {
            replica: answer
            if isinstance(answer, ServeError)
            else _decode(codec.decode_pool_state, answer.message)
            for replica, answer in answers.items()
        }

    def has_model(self, model: ModelRef) -> bool:
        return any(model.name in connection.models for connection in self._replicas.connections())


def _generation_request(method: Method, call: GenerationCall) -> ChannelRequest:
    message = codec.encode_generation_call(call, call.deadline_s)
    answer = 0 if method is Method.TOKENIZE_PROMPT else _estimate_answer(call.options)
    cost = max(estimate_prompt_tokens(call.prompt) + answer, 1)
    return ChannelRequest(method, message, cost, call.deadline_s, model=call.model.name)


def _estimate_answer(options: GenerationOptions) -> int:
    """Estimate the tokens of an answer, over all beams."""
    limit = options.max_new_tokens
    tokens = LONG_ANSWER_TOKENS if limit is None else min(limit, LONG_ANSWER_TOKENS)
    beams = 1 if options.beam_search is None else min(options.beam_search.num_beams, MAX_BEAMS)
    return beams * tokens


def _decode(decode: Callable[[Buffer], T], message: Buffer) -> T:
    try:
        return decode(message)
    except ChannelError as error:
        raise EngineFailed(f"bug: the replica sent an answer of another type: {error}") from error
