"""API keys: their text, their digest, and what a key permits.

A key is `hk-<id>-<secret>`. The server looks up the entry of a key by the public id, so it compares
only one digest per request. The secret has 256 random bits. It cannot be guessed even with a fast
hash, so SHA-256 is enough. A slow password hash would cost milliseconds per request, even for wrong
keys.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field

from deployments.artifacts.types import FrozenModel

KEY_PREFIX = "hk-"
ID_CHARS = 8  # hexadecimal
SECRET_BYTES = 32
MAX_KEY_CHARS = 128  # longer texts are not hashed; a header may have thousands of characters
# Names are labels of metrics and appear in messages.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
ANY_MODEL = "*"


class Scope(StrEnum):
    """A permission of a key. Only `admin` includes another one, `metrics`."""

    INFER = "infer"  # run models on CPUs, and read their descriptions
    GPU = "gpu"  # run models on GPUs; the requests need `infer` as well
    METRICS = "metrics"  # read metrics and usage
    ADMIN = "admin"  # operate the server


# A larger limit acts as this one, which no server reaches.
MAX_LIMIT = 10**12
Limit = Annotated[int, Field(ge=1), AfterValidator(lambda limit: min(limit, MAX_LIMIT))]


class KeyLimits(FrozenModel):
    """Limits of a key in the whole cluster; None: unlimited."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent_requests: Limit | None = None


class ApiKey(FrozenModel):
    """An entry of the key file. It has the digest of the key, never the key."""

    id: str = Field(pattern=rf"^[0-9a-f]{{{ID_CHARS}}}$")
    name: str = Field(pattern=NAME_PATTERN)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # digest of the whole key
    scopes: tuple[Scope, ...] = Field((Scope.INFER,), min_length=1)
    # Shell-style patterns, such as `org/*`.
    models: tuple[Annotated[str, Field(min_length=1)], ...] = Field((ANY_MODEL,), min_length=1)
    created: AwareDatetime
    expires: AwareDatetime | None = None
    limits: KeyLimits = KeyLimits()

    def is_expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires


def generate_key() -> str:
    return f"{KEY_PREFIX}{secrets.token_hex(ID_CHARS // 2)}-{secrets.token_urlsafe(SECRET_BYTES)}"


def has_key_form(text: str) -> bool:
    """Return whether the text can be a key; placeholders and keys of other services cannot."""
    return text.startswith(KEY_PREFIX) and len(text) <= MAX_KEY_CHARS


def key_id(key: str) -> str:
    return key[len(KEY_PREFIX) : len(KEY_PREFIX) + ID_CHARS]


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def matches_digest(key: str, digest: bytes) -> bool:
    """Return whether `digest` is the key's digest, compared in constant time."""
    return hmac.compare_digest(hash_key(key), digest)
