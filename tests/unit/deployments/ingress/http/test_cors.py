from __future__ import annotations

from pathlib import Path

import pytest

from deployments.config import CorsSettings, IngressUserConfig
from tests.support.artifacts import EMBEDDER
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

EMBED = f"/models/{EMBEDDER}"
PAGE = {"origin": "https://page.example"}
ASK = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def served(store: Path, *origins: str, key_file: Path | None = None) -> InProcess:
    cors = CorsSettings(origins=origins)
    return InProcess(store, settings=IngressUserConfig(cors=cors, key_file=key_file))


@pytest.mark.parametrize("origins", [(), ("https://other.example",), ("https://page.example.org",)])
async def test_other_pages_get_no_permission(tiny_store: Path, origins: tuple[str, ...]) -> None:
    async with served(tiny_store, *origins).client() as http:
        asked = await http.options(EMBED, headers=ASK)
        answer = await http.post(EMBED, json={"inputs": "a"}, headers=PAGE)
    assert asked.status_code == 405
    assert answer.status_code == 200
    for response in (asked, answer):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [("https://page.example",), ("*",)])
async def test_permitted_page_may_ask_without_a_key_and_read_answers(
    tiny_store: Path, tmp_path: Path, origins: tuple[str, ...]
) -> None:
    key_file = tmp_path / "keys.json"
    key = add_key(key_file)
    async with served(tiny_store, *origins, key_file=key_file).client() as http:
        asked = await http.options(EMBED, headers=ASK)
        answer = await http.post(EMBED, json={"inputs": "a"}, headers=PAGE | bearer(key))
        refused = await http.post(EMBED, json={"inputs": "a"}, headers=PAGE)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert (answer.status_code, refused.status_code) == (200, 401)
    for response in (asked, answer, refused):
        assert response.headers["access-control-allow-origin"] == PAGE["origin"]
        assert response.headers["vary"] == "origin"
        assert "access-control-allow-credentials" not in response.headers
