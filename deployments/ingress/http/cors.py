"""Cross-origin requests: which web pages may read the answers. Off by default.

Browsers send a page's origin and ask before requests with a key (https://fetch.spec.whatwg.org).
Cookies are never allowed: a key in a header is the only credential.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response

from deployments.config import CorsSettings

WILDCARD = "*"


class Cors:
    """The origins of `cors` in the `user_config` of the Ingress."""

    def __init__(self, settings: CorsSettings) -> None:
        self.settings = settings

    def is_allowed(self, headers: Headers) -> bool:
        origins = self.settings.origins
        if not origins or "origin" not in headers:
            return False
        return WILDCARD in origins or headers["origin"] in origins

    def build_preflight(self, headers: Headers) -> Response | None:
        """Return the answer to a browser that asks whether a page may send a request.

        None if it is another request, or if the page may not. It needs no key: browsers send none.
        """
        if "access-control-request-method" not in headers or not self.is_allowed(headers):
            return None
        return Response(
            status_code=204,
            headers={
                "access-control-allow-methods": "GET, POST, DELETE",
                # The clients of all dialects have headers of their own.
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
