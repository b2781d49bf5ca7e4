"""Cross-origin requests: which web pages may read the answers. Off by default.

Browsers send the origin of the page. Before a request with a key, they send a preflight request
(https://fetch.spec.whatwg.org). The only credential is a key in a header, so cookies are never
allowed.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response

from deployments.config import CorsSettings

WILDCARD = "*"


class Cors:
    """Cross-origin headers for the origins of `cors` in the `user_config` of the Ingress."""

    def __init__(self, settings: CorsSettings) -> None:
        self.settings = settings

    def is_allowed(self, headers: Headers) -> bool:
        origins = self.settings.origins
        if not origins or "origin" not in headers:
            return False
        return WILDCARD in origins or headers["origin"] in origins

    def build_preflight(self, headers: Headers) -> Response | None:
        """Return the answer to a preflight request of an allowed page, else None.

        A preflight request needs no key, because browsers send none with it.
        """
        if "access-control-request-method" not in headers or not self.is_allowed(headers):
            return None
        return Response(
            status_code=204,
            headers={
                "access-control-allow-methods": "GET, POST, DELETE",
                # Allow all requested headers: the clients of each API send different ones.
                "access-control-allow-headers": headers.get("access-control-request-headers", ""),
                "access-control-max-age": f"{self.settings.max_age_s:d}",
            },
        )

    def add_headers(self, headers: Headers, response: Response) -> None:
        """Let the page read the response, if its origin is allowed."""
        if not self.settings.origins:
            return
        response.headers.append("vary", "origin")
        if self.is_allowed(headers):
            response.headers["access-control-allow-origin"] = headers["origin"]
            response.headers["access-control-expose-headers"] = WILDCARD
