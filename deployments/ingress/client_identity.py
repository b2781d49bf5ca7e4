"""Identification of a request's client. Queues share their capacity equally among clients."""

from __future__ import annotations

import re
from contextvars import ContextVar
from functools import cached_property, lru_cache
from hashlib import blake2b
from ipaddress import AddressValueError, IPv6Address, IPv6Network

from starlette.datastructures import Headers

from deployments.keys.caller import current_caller
from deployments.request_headers import ADDRESS_HEADER, KEY_HEADERS

# Minimum length of a header with a key, `Bearer ` included. Shorter values are placeholders such as
# `Bearer -`, which some clients send where no key is needed.
MIN_KEY_CHARS = 16

# Some proxies append the port of the client, which differs in every connection.
WITH_PORT = re.compile(r"\[([^]]+)\](?::\d+)?|([\d.]+):\d+")


class RequestSource:
    """What tells where a request comes from. `trusted_proxies` is the setting at its arrival."""

    def __init__(self, headers: Headers, trusted_proxies: int) -> None:
        self._headers = headers
        self._trusted_proxies = trusted_proxies

    @cached_property
    def client(self) -> str:
        return identify_client(self._headers, self._trusted_proxies)


# None: the current task handles no request that has arrived over HTTP.
CURRENT_SOURCE: ContextVar[RequestSource | None] = ContextVar("source", default=None)


def current_client() -> str:
    """Return the name of the current request's API key, else the result of `identify_client`."""
    if name := current_caller().name:
        return name
    source = CURRENT_SOURCE.get()
    return "" if source is None else source.client


def identify_client(headers: Headers, trusted_proxies: int) -> str:
    """Return the digest of the API key, else the address of the client; "" without either.

    A key does not count if its header is shorter than MIN_KEY_CHARS.

    The /64 network stands for an IPv6 address, because a host owns all addresses of its network.
    Each proxy appends the address of its peer to `x-forwarded-for`. The last 1 + `trusted_proxies`
    addresses come from HAProxy and from the trusted proxies in front of HAProxy. The first of these
    is the address of the client. Clients can forge all earlier addresses.
    """
    for name in KEY_HEADERS:
        if name in headers and len(headers[name]) >= MIN_KEY_CHARS:
            return _digest(headers[name])
    if ADDRESS_HEADER not in headers:
        return ""
    addresses = ",".join(headers.getlist(ADDRESS_HEADER)).split(",")
    return _identify_host(addresses[-min(1 + trusted_proxies, len(addresses))].strip())


@lru_cache(4_096)
def _identify_host(address: str) -> str:
    if found := WITH_PORT.fullmatch(address):
        address = found[1] or found[2]
    try:
        parsed = IPv6Address(address)
    except AddressValueError:
        return address
    return str(parsed.ipv4_mapped or IPv6Network((int(parsed), 64), strict=False))


@lru_cache(4_096)
def _digest(key: str) -> str:
    return blake2b(key.encode(), digest_size=8).hexdigest()
