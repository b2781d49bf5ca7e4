"""Sending of large answers in chunks within a time limit, with a limit of the bytes in flight.

The HTTP server buffers what the client has not read yet. If a body is sent in one piece, the server
buffers all of it. If it is sent in chunks, the server buffers one chunk, and the next `send` waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Send

from deployments.capacity import Capacity
from deployments.ingress.client_identity import current_client

log = logging.getLogger("ray.serve.hundredfold")

CHUNK_BYTES = 1 << 16
# Lowest rate at which a client may read. The time limit of an answer is its size divided by this
# rate, plus the write timeout of streams. After the limit, the connection is closed.
MIN_BYTES_PER_S = 100_000


class ReservedBytes(NamedTuple):
    size: int
    client: str


class LargeResponseSender:
    """Sender of answers above CHUNK_BYTES. `write_timeout_s` returns the current setting."""

    def __init__(self, capacity: Capacity, write_timeout_s: Callable[[], float]) -> None:
        self._capacity = capacity
        self._write_timeout_s = write_timeout_s

    def reserve(self, response: Response) -> ReservedBytes:
        """Reserve the bytes of an answer, at most the whole capacity. Raises Overloaded."""
        reserved = ReservedBytes(min(len(response.body), self._capacity.limit), current_client())
        self._capacity.reserve(*reserved)
        return reserved

    async def send(self, response: Response, reserved: ReservedBytes, send: Send) -> None:
        """Send an answer, then release its bytes.

        If the answer is incomplete, the HTTP server closes the connection.
        """
        body = bytes(response.body)
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
        try:
            async with asyncio.timeout(self._write_timeout_s() + len(body) / MIN_BYTES_PER_S):
                await send(start)
                for offset in range(0, len(body), CHUNK_BYTES):
                    end = offset + CHUNK_BYTES
                    await send(
                        {
                            "type": "http.response.body",
                            "body": body[offset:end],
                            "more_body": end < len(body),
                        }
                    )
        except (TimeoutError, OSError) as exc:
            log.info("answer of %d bytes not sent, the client does not read: %r", len(body), exc)
        finally:
            self._capacity.release(*reserved)
