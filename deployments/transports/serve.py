"""Tokenizer and encoder behind Ray Serve handles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments.errors import EngineFailed, Overloaded, ServeError
from deployments.generation.messages import Chunk, Completion, GenerationCall, Started
from deployments.messages import (
    CallBatch,
    DecodeRequest,
    Outcome,
    TextTokens,
    TokenizeRequest,
)

log = logging.getLogger("ray.serve.hundredfold")

T = TypeVar("T")

# Plain pickle instead of cloudpickle: messages are data, and cloudpickle's hook runs Python code
# for every object of a list.
PLAIN = {"request_serialization": "pickle", "response_serialization": "pickle"}


class ServeEncoderClient:
    """A EncoderClient over two handles.

    The tokenizer's response is passed on un-awaited, which measured a third more requests per
    second than awaiting it first.
    """

    def __init__(self, tokenizer: DeploymentHandle, encoder: DeploymentHandle) -> None:
        self._tokenize_batch = tokenizer.tokenize_batch.options(**PLAIN)
        self._infer = encoder.infer.options(**PLAIN)

    async def infer(self, batch: CallBatch) -> list[Outcome]:
        """Encode and run."""
        outcomes: list[Outcome] = await retry_once(
            lambda: self._infer.remote(self._tokenize_batch.remote(batch))
        )
        return outcomes


class ServeTokenizerClient:
    """A TokenizerClient over a handle."""

    def __init__(self, tokenizer: DeploymentHandle) -> None:
        self._tokenize = tokenizer.tokenize.options(**PLAIN)
        self._decode = tokenizer.decode.options(**PLAIN)

    async def tokenize(self, request: TokenizeRequest) -> tuple[TextTokens, ...]:
        """Ask a replica."""
        outcome: tuple[TextTokens, ...] | ServeError = await retry_once(
            lambda: self._tokenize.remote(request)
        )
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome

    async def decode(self, request: DecodeRequest) -> tuple[str, ...]:
        """Ask a replica."""
        outcome: tuple[str, ...] | ServeError = await retry_once(
            lambda: self._decode.remote(request)
        )
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome


class ServeGeneratorClient:
    """A GeneratorClient over a handle."""

    def __init__(self, generator: DeploymentHandle) -> None:
        self._complete = generator.complete.options(**PLAIN)
        self._stream = generator.stream.options(stream=True, **PLAIN)

    async def complete(self, call: GenerationCall) -> Completion:
        """Ask a replica, which is told when nobody waits any more."""
        outcome: Completion | ServeError = await retry_once(
            lambda: cancel_with_caller(self._complete.remote(call))
        )
        if isinstance(outcome, ServeError):
            raise outcome
        return outcome

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        """Ask a replica; another one when it is lost before anything came."""
        has_begun = False
        for is_last_try in (False, True):
            response = self._stream.remote(call)
            try:
                async for news in response:
                    has_begun = True
                    if isinstance(news, ServeError):
                        raise news
                    yield news
                return
            except BackPressureError as exc:
                raise Overloaded("too many requests wait on the way; try again later") from exc
            except (RayActorError, DeploymentUnavailableError) as exc:
                if has_begun or is_last_try:
                    raise EngineFailed("the replica was lost while generating") from exc
                log.warning("a replica was lost, trying once more: %s", exc)
            finally:
                response.cancel()


async def cancel_with_caller(response: DeploymentResponse[T]) -> T:
    """What it gives; whoever gives up on it ends the work as well, which Serve does not by itself.

    Passes take milliseconds, answers minutes: only these are worth it.
    """
    try:
        answer: T = await response
        return answer
    except asyncio.CancelledError:
        response.cancel()
        raise


async def retry_once(ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` gives; asked once more when a replica dies, for all we ask repeats safely.

    Raises EngineFailed when it died twice, Overloaded when a waiting line is full.
    """
    try:
        return await _asked(ask)
    except (RayActorError, DeploymentUnavailableError) as exc:
        log.warning("a replica was lost, trying once more: %s", exc)
    try:
        return await _asked(ask)
    except (RayActorError, DeploymentUnavailableError) as exc:
        raise EngineFailed("the replica was lost twice while computing") from exc


async def _asked(ask: Callable[[], Awaitable[T]]) -> T:
    try:
        return await ask()
    except BackPressureError as exc:
        raise Overloaded("too many lists wait on the way; try again later") from exc
