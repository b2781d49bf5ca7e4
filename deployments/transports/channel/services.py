"""The methods of each kind of replica as handlers of encoded messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from math import inf
from typing import Any, Protocol

from deployments.errors import ServeError
from deployments.messages import CallBatch, Chunk, PoolRequest, PoolState, TokenizedBatch
from deployments.replicas.encoder import EncoderReplica
from deployments.replicas.generator import GeneratorReplica
from deployments.replicas.model_pool import ModelPool
from deployments.replicas.tokenizer import TokenizerReplica
from deployments.transports.base import unwrap
from deployments.transports.channel import codec
from deployments.transports.channel.frames import MAX_U32, Method
from deployments.transports.channel.server import Reply, Service, StreamHandler, UnaryHandler

# Maximum characters in a tokenizer replica and tokens in an encoder replica. The limits are high
# and only bound memory. With lower limits, calls would wait in the ingress instead of in the fair
# queues of the replicas.
TOKENIZER_WINDOW = 64_000_000
ENCODER_WINDOW = 16_000_000
TOKEN_BYTES = 4  # of a token id in `TokenizedBatch.ids`
# Calls prefer replicas that have the model. Another replica loads the model when all replicas with
# the model have more load than the least loaded replica plus this cost (characters or tokens).
# Loading a model takes about as long as work of this cost.
TOKENIZER_SPREAD = 200_000
ENCODER_SPREAD = 8_192
GENERATOR_SPREAD = 2_048  # four answers of LONG_ANSWER_TOKENS (deployment_clients.py)


def tokenizer_service(replica: TokenizerReplica) -> Service:
    """Build the service of a tokenizer replica. The cost of a call is its number of characters."""

    async def tokenize_batch(message: memoryview, deadline_s: float) -> Reply:
        batch = await replica.tokenize_batch(codec.decode_call_batch(message, deadline_s))
        _raise_refusal(batch.calls, len(batch.calls))
        return Reply(codec.encode_tokenized_batch(batch, deadline_s), len(batch.ids) // TOKEN_BYTES)

    async def tokenize(message: memoryview, _deadline_s: float) -> Reply:
        request = codec.decode_tokenize_request(message)
        return Reply(codec.encode_message(unwrap(await replica.tokenize(request))))

    async def decode(message: memoryview, _deadline_s: float) -> Reply:
        request = codec.decode_decode_request(message)
        return Reply(codec.encode_message(unwrap(await replica.decode(request))))

    unary: dict[int, UnaryHandler] = {
        Method.TOKENIZE_BATCH: tokenize_batch,
        Method.TOKENIZE: tokenize,
        Method.DECODE: decode,
        Method.MANAGE_POOL: _build_pool_handler(replica),
    }
    return Service(unary, {}, TOKENIZER_WINDOW, replica.pool)


def encoder_service(replica: EncoderReplica, tokenizer: TokenizerReplica) -> Service:
    """Build the service of an encoder replica.

    The cost of an INFER call is its number of tokens without padding. For a TOKENIZE_AND_INFER
    call, the client estimates this number.
    """

    async def run(given: CallBatch | TokenizedBatch) -> AsyncGenerator[bytes | Reply, None]:
        batch = (
            given if isinstance(given, TokenizedBatch) else await tokenizer.tokenize_batch(given)
        )
        unanswered = len(batch.calls)
        async with aclosing(replica.stream(batch)) as parts:
            async for outcomes in parts:
                _raise_refusal(outcomes.values(), len(batch.calls))
                message = codec.encode_outcomes(outcomes)
                unanswered -= len(outcomes)
                yield message if unanswered else Reply(message)

    def infer(message: memoryview, deadline_s: float) -> AsyncGenerator[bytes | Reply, None]:
        return run(codec.decode_tokenized_batch(message, deadline_s))

    def tokenize_and_infer(
        message: memoryview, deadline_s: float
    ) -> AsyncGenerator[bytes | Reply, None]:
        return run(codec.decode_call_batch(message, deadline_s))

    streams: dict[int, StreamHandler] = {
        Method.INFER: infer,
        Method.TOKENIZE_AND_INFER: tokenize_and_infer,
    }
    unary: dict[int, UnaryHandler] = {Method.MANAGE_POOL: _build_pool_handler(replica, tokenizer)}
    return Service(unary, streams, ENCODER_WINDOW, replica.pool)


def generator_service(replica: GeneratorReplica) -> Service:
    """Build the service of a generator replica.

    The cost of a call is the client's estimate of the tokens of prompt and answer. The channel does
    not limit the total cost, because the replica's queue limits the calls.
    """

    async def complete(message: memoryview, deadline_s: float) -> Reply:
        call = codec.decode_generation_call(message, deadline_s)
        return Reply(codec.encode_message(unwrap(await replica.complete(call))))

    async def stream(message: memoryview, deadline_s: float) -> AsyncGenerator[bytes | Reply, None]:
        call = codec.decode_generation_call(message, deadline_s)
        async with aclosing(replica.stream(call)) as events:
            async for event in events:
                if isinstance(event, ServeError):
                    raise event
                encoded = codec.encode_event(event)
                is_last = isinstance(event, Chunk) and event.finished is not None
                yield Reply(encoded) if is_last else encoded

    async def tokenize_prompt(message: memoryview, deadline_s: float) -> Reply:
        call = codec.decode_generation_call(message, deadline_s)
        return Reply(codec.encode_message(unwrap(await replica.tokenize_prompt(call))))

    unary: dict[int, UnaryHandler] = {
        Method.COMPLETE: complete,
        Method.TOKENIZE_PROMPT: tokenize_prompt,
        Method.MANAGE_POOL: _build_pool_handler(replica),
    }
    return Service(unary, {Method.STREAM: stream}, MAX_U32, replica.pool)


def _raise_refusal(outcomes: Iterable[object], calls: int) -> None:
    """Raise a refusal if all calls are refused; the client then tries another replica.

    `calls` is the number of calls. One error answers all of them, so raise the refusal that
    predicts the shortest time, or any refusal if none has a prediction.
    """
    refusals = [one for one in outcomes if isinstance(one, ServeError) and one.elsewhere]
    if refusals and len(refusals) == calls:
        raise min(refusals, key=lambda one: getattr(one, "needed_s", None) or inf)


class HasPool(Protocol):
    @property
    def pool(self) -> ModelPool[Any]: ...


async def manage_pools(request: PoolRequest, replica: HasPool, *others: HasPool) -> PoolState:
    """Apply `request` to all pools of a replica; return the state of the first pool.

    Raises the ServeError of a failed load.
    """
    for other in others:
        await other.pool.apply(request)
    return await replica.pool.apply(request)


def _build_pool_handler(replica: HasPool, *others: HasPool) -> UnaryHandler:
    async def manage(message: memoryview, _deadline_s: float) -> Reply:
        request = codec.decode_pool_request(message)
        return Reply(codec.encode_message(await manage_pools(request, replica, *others)))

    return manage
