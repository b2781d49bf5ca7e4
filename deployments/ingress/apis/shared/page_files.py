"""Files of a web page, with headers that restrict the page to resources of this server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

REVALIDATED = "no-cache"  # revalidate on each request; most responses are 304


def build_policy(**sources: str) -> str:
    """Build a content security policy that allows only resources of this server and `data:` images.

    `sources` adds directives or replaces them, such as `style_src="'self'"`.
    """
    directives = {
        "default_src": "'none'",
        "script_src": "'self'",
        "style_src": "'self'",
        "img_src": "'self' data:",
        "connect_src": "'self'",
        "base_uri": "'none'",
        "form_action": "'none'",
        "frame_ancestors": "'none'",
        **sources,
    }
    return "; ".join(f"{name.replace('_', '-')} {value}" for name, value in directives.items())


class PageFiles:
    """Files of one directory. Callers must pass only names of existing files."""

    def __init__(self, directory: Path, policy: str) -> None:
        self._files = StaticFiles(directory=directory)
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }

    async def respond(
        self,
        name: str,
        request: Request,
        cache_control: str = REVALIDATED,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return a response with a file, or status 304 if the browser has the file."""
        response = await self._files.get_response(name, request.scope)
        response.headers.update({**self._headers, "cache-control": cache_control})
        response.headers.update(headers or {})
        return response
