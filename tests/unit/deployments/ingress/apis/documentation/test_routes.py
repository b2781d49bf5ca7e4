"""Tests of the Swagger UI page and its files."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from deployments.ingress.apis.documentation import routes as docs
from tests.support.in_process import InProcess

LOADS = re.compile(r"""(?:src|href)\s*=\s*["']([^"']*)["']""")


@pytest.mark.parametrize("prefix", ["", "/below/it"])
@pytest.mark.parametrize("path", ["/docs", "/docs/"])
async def test_page_loads_local_files_below_the_prefix_only(
    path: str, prefix: str, tiny_store: Path
) -> None:
    async with InProcess(tiny_store).application() as app:
        transport = httpx.ASGITransport(app, root_path=prefix)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", follow_redirects=True
        ) as http:
            page = await http.get(f"{prefix}{path}")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            start = await http.get(f"{prefix}/docs/start.js")
            loaded = [*LOADS.findall(page.text), *re.findall(r'url: "([^"]+)"', start.text)]
            assert {"docs/swagger-ui-bundle.js", "openapi.json"} <= set(loaded)
            for address in loaded:
                if address != "data:,":
                    url = page.url.join(address)
                    assert url.path.startswith(f"{prefix}/"), address
                    assert (await http.get(url)).status_code == 200
    assert "//" not in page.text.replace("<!doctype html>", "")


async def test_content_security_policy_blocks_other_hosts(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        page = await http.get("/docs")
        start = await http.get("/docs/start.js")
    policy = dict(part.strip().split(" ", 1) for part in docs.POLICY.split(";"))
    assert page.headers["content-security-policy"] == docs.POLICY
    assert policy.pop("default-src") == "'none'"
    sources = {word for words in policy.values() for word in words.split()}
    assert sources == {"'self'", "'none'", "'unsafe-inline'", "data:"}
    assert "unsafe-inline" not in policy["script-src"]
    assert "<script>" not in page.text
    assert "validatorUrl: null" in start.text
    assert "http" not in start.text


async def test_files_support_conditional_requests(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        for path in ("/docs", "/docs/swagger-ui.css", "/docs/start.js"):
            first = await http.get(path)
            again = await http.get(path, headers={"if-none-match": first.headers["etag"]})
            assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
            assert first.headers["x-content-type-options"] == "nosniff"
        script = await http.get("/docs/swagger-ui-bundle.js")
    assert script.headers["cache-control"] == "public, max-age=3600"
    assert script.headers["content-type"].startswith("text/javascript")


async def test_swagger_ui_has_version_5(tiny_store: Path) -> None:
    """Swagger UI 4 does not support OpenAPI 3.1, the format of the document."""
    async with InProcess(tiny_store).client() as http:
        script = await http.get("/docs/swagger-ui-bundle.js")
    assert "https://spec.openapis.org/oas/3.1/dialect/base" in script.text


@pytest.mark.parametrize(
    "path",
    ["/docs/index.html", "/docs/swagger_ui/LICENSE", "/docs/..%2fcore.py", "/docs/%2e%2e/docs.py"],
)
async def test_other_files_are_not_served(path: str, tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        assert (await http.get(path)).status_code == 404


async def test_path_of_a_file_may_end_with_a_slash(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        for path in ("/docs/swagger-ui.css", "/docs/start.js"):
            file, again = [await http.get(path + end) for end in ("", "/")]
            assert (again.status_code, again.content) == (200, file.content)
