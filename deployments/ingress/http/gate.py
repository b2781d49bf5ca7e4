"""Access check before every operation: whether the key of a request permits the operation.

The check needs only the headers of a request. It runs before the body is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path

from deployments.errors import Forbidden, Unauthorized
from deployments.ingress.http.api import Access
from deployments.keys.caller import set_current_caller
from deployments.keys.key import KEY_PREFIX, Scope, has_key_form
from deployments.keys.key_ring import KeyRing
from deployments.keys.limits import MeteredRequest
from deployments.request_headers import KEY_HEADERS

BEARER = "bearer "
USUAL_START = f"Bearer {KEY_PREFIX}"
# One of these scopes permits an operation.
SCOPES: Mapping[Access, tuple[Scope, ...]] = {
    Access.INFER: (Scope.INFER,),
    Access.METRICS: (Scope.METRICS, Scope.ADMIN),
    Access.ADMIN: (Scope.ADMIN,),
}


class AccessGate:
    """Access check by the keys of `key_ring`. If it is None, requests need no key.

    The limits of a key are divided by the number of ingress replicas, `count_replicas()`.
    """

    def __init__(self, count_replicas: Callable[[], int] = lambda: 1) -> None:
        self.key_ring: KeyRing | None = None
        self._count_replicas = count_replicas

    def open_key_ring(self, key_file: Path | None) -> KeyRing | None:
        """Return the current keys if they are of `key_file`, else read it.

        Raises BadSetting if the file is missing or invalid.
        """
        if key_file is None:
            return None
        is_current = self.key_ring is not None and self.key_ring.path == key_file
        return self.key_ring if is_current else KeyRing(key_file)

    def admit(self, access: Access, headers: Mapping[str, str]) -> MeteredRequest | None:
        """Set the current caller to that of the key; meter the request if the key has limits.

        Raises Unauthorized, Forbidden or RateLimited.
        """
        if access is Access.PUBLIC:
            return None
        if self.key_ring is None:
            if access is not Access.INFER and not self.may_manage(headers):
                raise Forbidden(
                    "web pages of other servers cannot observe or manage this one; use an API key, "
                    "or open the page of this server by its IP address"
                )
            return None
        caller = self.key_ring.authenticate(find_key(headers))
        set_current_caller(caller)
        caller.require_scope(*SCOPES[access])
        return None if caller.meter is None else caller.meter.enter(self._count_replicas())

    def may_manage(self, headers: Mapping[str, str]) -> bool:
        """Return whether the sender of a request may change the server, if its key permits that.

        Without keys, pages of other servers may not.
        """
        return self.key_ring is not None or not is_foreign_page(headers)


def is_foreign_page(headers: Mapping[str, str]) -> bool:
    """Return whether a browser sends this request for a page that may belong to another server.

    A page belongs to this server if its origin is this host as an IP address or `localhost`. A host
    name does not count: an attacker's domain may resolve to this host (DNS rebinding).
    """
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    origin = headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2] != host or not _is_address(name)
    # Browsers send no origin when a page reads from its own host. Browsers are recognized by
    # `accept-language`: scripts cannot remove it, and few other clients send it. `sec-fetch-mode`
    # excludes an attack: scripts cannot add it, and browsers send it only where a certificate
    # proves the name of the server. Node.js sends both headers.
    is_unproven = "accept-language" in headers and "sec-fetch-mode" not in headers
    return is_unproven and not _is_address(name)


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name.strip("[]")))
    except ValueError:
        return name == "localhost"


def find_key(headers: Mapping[str, str]) -> str:
    """Return the key in the headers. Raises Unauthorized if there is none.

    Several headers may have a key. One in the form of this server's keys takes precedence, because
    Hugging Face's client by default adds the user's Hugging Face token to `authorization`.
    """
    bearer = headers.get(KEY_HEADERS[0], "")
    if bearer.startswith(USUAL_START):
        return bearer[len(BEARER) :]
    found = [_strip_scheme(headers[name]) for name in KEY_HEADERS if name in headers]
    if not found:
        raise Unauthorized(
            "an API key is required: send the header `Authorization: Bearer KEY` or "
            "`x-api-key: KEY`"
        )
    return next(filter(has_key_form, found), found[0])


def _strip_scheme(text: str) -> str:
    return text[len(BEARER) :].strip() if text[: len(BEARER)].lower() == BEARER else text.strip()
