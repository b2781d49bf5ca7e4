"""Tests of the Messages API with a tiny thinking model instead of a fake generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.config import GeneratorSettings
from deployments.generation.reasoning import THINK
from tests.support.chat_harness import USER
from tests.support.decoder_artifacts import CHATML, seal_tiny_decoder
from tests.support.in_process import InProcess
from tests.support.messages_harness import COUNT, MESSAGES

OPEN, CLOSE = THINK.open, THINK.close
THINKER, SAYS = "tiny/hybrid", f"{OPEN}Hm.{CLOSE} Yes!"
# As Qwen3's template: it closes the reasoning if the request disables it.
TEMPLATE = (
    CHATML + f"{{% if enable_thinking is false %}}{{{{ '{OPEN}\n\n{CLOSE}\n\n' }}}}{{% endif %}}"
)
BODY = {"model": THINKER, "messages": [USER], "max_tokens": 50, "temperature": 0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("thinking")
    seal_tiny_decoder(store, THINKER, says=SAYS, template=TEMPLATE, added_tokens=THINK)
    return store


async def ask(store: Path, path: str = MESSAGES, **changes: Any) -> Any:
    server = InProcess(store, models=(THINKER,), writes=GeneratorSettings(kv_slots=2))
    async with server.client() as http:
        response = await http.post(path, json={**BODY, **changes})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}, {"type": "enabled"}])
async def test_model_thinks_before_its_text(thinking: Any, store: Path) -> None:
    message = await ask(store, thinking=thinking)
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Yes!"},
    ]


async def test_answer_after_a_closed_reasoning_is_text(store: Path) -> None:
    message = await ask(store, thinking={"type": "disabled"})
    assert message["content"] == [{"type": "text", "text": SAYS}]


async def test_stop_sequence_is_named(store: Path) -> None:
    message = await ask(store, stop_sequences=["no", "s!"])
    assert message["content"][-1] == {"type": "text", "text": "Ye"}
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "s!")


async def test_counted_tokens_are_those_of_the_usage(store: Path) -> None:
    usage = (await ask(store))["usage"]
    assert await ask(store, COUNT) == {"input_tokens": usage["input_tokens"]}
