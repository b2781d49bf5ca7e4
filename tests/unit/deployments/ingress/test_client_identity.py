from __future__ import annotations

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from deployments.config import IngressUserConfig, LimitSettings
from deployments.ingress.client_identity import identify_client
from tests.support.artifacts import EMBEDDER
from tests.support.fakes import RecordingEncoder
from tests.support.in_process import InProcess

KEY = "Bearer sk-0123456789abcdef"


def headers(*pairs: tuple[str, str]) -> Headers:
    return Headers(raw=[(name.encode(), text.encode()) for name, text in pairs])


@pytest.mark.parametrize(
    ("sent", "trusted_proxies", "client"),
    [
        ([], 0, ""),
        ([("x-forwarded-for", "10.0.0.7")], 0, "10.0.0.7"),
        # Only the last line, which HAProxy appends, counts. The client can forge the others.
        ([("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "10.0.0.7")], 0, "10.0.0.7"),
        ([("x-forwarded-for", "1.1.1.1, 8.8.8.8"), ("x-forwarded-for", "10.0.0.7")], 1, "8.8.8.8"),
        ([("x-forwarded-for", "10.0.0.7")], 2, "10.0.0.7"),
        ([("authorization", "Bearer -"), ("x-forwarded-for", "10.0.0.7")], 0, "10.0.0.7"),
        ([("x-forwarded-for", "::ffff:10.0.0.7")], 0, "10.0.0.7"),
        ([("x-forwarded-for", "10.0.0.7:51234, 10.0.0.1")], 1, "10.0.0.7"),
        ([("x-forwarded-for", "[2001:db8::7]:51234")], 0, "2001:db8::/64"),
        ([("x-forwarded-for", "[2001:db8::7]")], 0, "2001:db8::/64"),
    ],
)
def test_client_without_a_key_is_its_address(
    sent: list[tuple[str, str]], trusted_proxies: int, client: str
) -> None:
    assert identify_client(headers(*sent), trusted_proxies) == client


def test_ipv6_client_is_its_network() -> None:
    first, neighbor, other = (
        identify_client(headers(("x-forwarded-for", address)), 0)
        for address in ("2001:db8:0:7::1", "2001:db8:0:7:ffff::2", "2001:db8:0:8::1")
    )
    assert first == neighbor != other


def test_client_with_a_key_is_its_digest_wherever_it_comes_from() -> None:
    first = headers(("authorization", KEY), ("x-forwarded-for", "10.0.0.7"))
    second = headers(("authorization", KEY), ("x-forwarded-for", "10.0.0.8"))
    other = headers(("x-api-key", KEY + "0"))
    assert identify_client(first, 0) == identify_client(second, 0) != identify_client(other, 0)
    assert "sk-" not in identify_client(first, 0)


async def test_addresses_of_trusted_proxies_are_skipped(tiny_store: Path) -> None:
    encoder = RecordingEncoder()
    settings = IngressUserConfig(limits=LimitSettings(trusted_proxies=1))
    async with InProcess(tiny_store, encoder=encoder, settings=settings).client() as http:
        headers = {"x-forwarded-for": "1.1.1.1, 8.8.8.8, 10.0.0.7"}
        await http.post(f"/models/{EMBEDDER}", json={"inputs": "a"}, headers=headers)
    assert [call.client for call in encoder.calls] == ["8.8.8.8"]


async def test_calls_carry_client_priority_and_deadline(tiny_store: Path) -> None:
    encoder = RecordingEncoder()
    sent = {"x-forwarded-for": "10.0.0.7", "x-priority": "batch"}
    async with InProcess(tiny_store, encoder=encoder).client() as http:
        for text, more in (("a", sent), ("b", {})):
            response = await http.post(f"/models/{EMBEDDER}", json={"inputs": text}, headers=more)
            assert response.status_code == 200
    batch, plain = encoder.calls
    assert (batch.client, batch.priority) == ("10.0.0.7", 1)
    assert (plain.client, plain.priority) == ("", 0)
