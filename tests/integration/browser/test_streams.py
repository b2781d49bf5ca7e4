"""Streamed generation in the page: text, stop, sampling options, schemas, errors in a stream."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Page, expect

from benchmarks.page.browser import OBSERVE_SHIFTS
from deployments.errors import EngineFailed, Overloaded
from deployments.messages import Chunk, FinishReason, Token
from tests.support.browser import Visitor, wait_for_server
from tests.support.fakes import TIMEOUT_S
from tests.support.scripted_generation import CHUNKS, TEXT, ScriptedGenerator, ending

WORDS = 200
# Pause between words. Without a pause, all words arrive within 40 ms and the page draws them at
# once. A model on two cores generates 60 to 200 words a second.
PAUSE_S = 0.005
SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}}'
# Values with which the methods of Python clients differ from the API of the page.
OPTIONS = {
    "Temperature": "0",
    "Top p": "1",
    "Top k": "0",
    "Repetition penalty": "1.1",
    "Seed": "-1",
    "Stop strings": "END\nHALT",
    "JSON schema of the answer": SCHEMA,
}
# A response whose connection ends before all bytes of its content-length have arrived.
HALF_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n"
    b'data:{"choices":[{"delta":{"content":" a"}}]}\n\n'
)


@pytest.fixture
def chat(visitor: Visitor, generator: ScriptedGenerator) -> Iterator[Page]:
    generator.calls.clear()
    yield visitor.open("play/chat")
    generator.chunks, generator.pause_s, generator.refusal = CHUNKS, 0.0, None
    generator.cached_tokens = 0


def send(page: Page, text: str = "Hello") -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_conversation_is_sent_with_its_history(
    chat: Page, visitor: Visitor, generator: ScriptedGenerator
) -> None:
    for text in ("First", "Second"):
        send(chat, text)
        expect(chat.locator(".turn").last.locator(".facts")).to_contain_text("4 tokens")
        expect(chat.locator(".by-model").last).to_have_text(TEXT)
    said = [message["content"] for message in generator.calls[-1].prompt.messages]
    assert said == ["First", TEXT, "Second"]
    expect(chat.locator(".phases")).to_contain_text("Prefill20.0 ms")
    expect(chat.locator(".phases")).to_contain_text("Tokenize1.00 ms")
    expect(chat.locator(".cost .facts")).to_contain_text("Cache no prompt token")
    expect(chat.locator(".cost .facts")).to_contain_text("First token")
    visitor.snap("chat")
    chat.get_by_role("button", name="New conversation").click()
    expect(chat.locator(".turn")).to_have_count(0)


def test_reasoning_is_folded_above_the_answer(
    chat: Page, visitor: Visitor, generator: ScriptedGenerator
) -> None:
    thoughts = (Token(3, "Let me", reasoning=True), Token(4, " see.", reasoning=True))
    generator.chunks = (*(Chunk("", (token,)) for token in thoughts), *CHUNKS)
    send(chat)
    expect(chat.locator(".by-model")).to_have_text(TEXT)
    reasoning = chat.locator(".reasoning")
    expect(reasoning.locator("p")).to_be_hidden()
    reasoning.get_by_text("Reasoning").click()
    expect(reasoning.locator("p")).to_have_text("Let me see.")
    visitor.snap("reasoning")
    generator.chunks = CHUNKS
    send(chat, "Next")
    expect(chat.locator(".reasoning").last).to_be_hidden()
    assert [each["content"] for each in generator.calls[-1].prompt.messages][1] == TEXT


def test_reasoning_without_an_answer_stays_open(
    chat: Page, visitor: Visitor, generator: ScriptedGenerator
) -> None:
    cut = Chunk("", (), ending(FinishReason.LENGTH, tokens=1))
    generator.chunks = (Chunk("", (Token(3, "Let me", reasoning=True),)), cut)
    send(chat)
    expect(chat.locator(".turn .facts")).to_contain_text("token limit")
    expect(chat.locator(".reasoning p")).to_be_visible()
    expect(chat.locator(".reasoning p")).to_have_text("Let me")
    visitor.snap("reasoning-cut")


def test_prompt_tokens_from_the_cache_are_counted(chat: Page, generator: ScriptedGenerator) -> None:
    generator.cached_tokens = 1
    send(chat)
    expect(chat.locator(".cost .facts")).to_contain_text("Cache 1 of 2 prompt tokens")


def test_options_reach_the_generator(chat: Page, generator: ScriptedGenerator) -> None:
    for label, value in {
        "System prompt": "Be brief.",
        "Tokens, at most": "17",
        "Temperature": "0.75",
        "Top p": "0.92",
        "Repetition penalty": "1.1",
        "Seed": "7",
        "Stop strings": "END\nHALT",
        "JSON schema of the answer": SCHEMA,
    }.items():
        chat.get_by_label(label).fill(value)
    send(chat)
    expect(chat.locator(".total")).to_be_visible()
    options = generator.calls[-1].options
    assert generator.calls[-1].prompt.messages[0] == {"role": "system", "content": "Be brief."}
    assert (options.max_new_tokens, options.stop) == (17, ("END", "HALT"))
    assert (options.sampling.temperature, options.sampling.top_p) == (0.75, 0.92)
    assert (options.sampling.repetition_penalty, options.sampling.seed) == (1.1, 7)
    assert options.grammar is not None
    assert "age" in options.grammar.value


def test_folded_option_out_of_range_is_shown(visitor: Visitor) -> None:
    page = visitor.open("play/completion")
    temperature = page.get_by_label("Temperature")
    page.locator("summary").click()
    temperature.fill("3")
    page.locator("summary").click()
    page.get_by_role("button", name="Continue").click()
    expect(temperature).to_be_focused()
    expect(page.locator(".answer .cost").first).to_be_hidden()


def test_stop_ends_the_generation_and_keeps_the_text(
    chat: Page, visitor: Visitor, generator: ScriptedGenerator
) -> None:
    generator.chunks = CHUNKS[:2]  # without the last chunk, so that the stream stays open
    send(chat)
    expect(chat.locator(".by-model")).to_have_text(TEXT)
    # Enter stops nothing, neither in the message nor in an option.
    chat.get_by_label("Message").fill("Next")
    chat.get_by_label("Message").press("Enter")
    chat.get_by_label("Seed").press("Enter")
    chat.get_by_label("Seed").press("Control+Enter")
    expect(chat.get_by_label("Message")).to_have_value("Next")
    assert generator.running == 1
    chat.get_by_role("button", name="Stop").click()
    expect(chat.locator(".turn .facts")).to_contain_text("stopped")
    wait_for_server(lambda: generator.running == 0)
    visitor.snap("chat-stopped")
    send(chat)
    expect(chat.locator(".turn")).to_have_count(2)
    chat.keyboard.press("Escape")
    expect(chat.locator(".turn .facts").nth(1)).to_contain_text("stopped")


def test_new_conversation_stops_the_stream_and_forgets_its_turn(
    chat: Page, generator: ScriptedGenerator
) -> None:
    generator.chunks = CHUNKS[:2]  # without the last chunk, so that the stream stays open
    send(chat, "First")
    expect(chat.locator(".by-model")).to_have_text(TEXT)
    chat.get_by_role("button", name="New conversation").click()
    wait_for_server(lambda: generator.running == 0)
    expect(chat.get_by_role("button", name="Send")).to_be_enabled()
    expect(chat.locator(".turn, .cost")).to_have_count(0)
    expect(chat.get_by_label("Message")).to_have_value("")
    generator.chunks = CHUNKS
    send(chat, "Second")
    expect(chat.locator(".turn .facts")).to_contain_text("4 tokens")
    assert [said["content"] for said in generator.calls[-1].prompt.messages] == ["Second"]


def test_long_wait_is_explained(chat: Page, visitor: Visitor, generator: ScriptedGenerator) -> None:
    generator.pause_s = 60.0
    chat.clock.install()
    send(chat)
    wait_for_server(lambda: generator.running == 1)
    chat.clock.run_for(5_000)
    expect(chat.locator(".waiting")).to_contain_text("Still waiting")
    visitor.snap("long-wait")
    chat.get_by_role("button", name="Stop").click()
    expect(chat.locator(".waiting")).to_have_count(0)
    expect(chat.get_by_label("Message")).to_have_value("Hello")


def test_long_answer_is_no_wait(chat: Page, generator: ScriptedGenerator) -> None:
    generator.chunks = [CHUNKS[0]]  # without the last chunk, so that the stream stays open
    chat.clock.install()
    hung = generator.hung
    send(chat)
    wait_for_server(lambda: generator.hung > hung)
    chat.clock.run_for(5_000)
    expect(chat.locator(".by-model")).to_have_text(" a")
    # The clock of the page goes on while the test waits.
    expect(chat.locator(".clock").first).to_have_text(re.compile(r"^([5-9]|\d\d)\.\d+ s$"))
    expect(chat.locator(".waiting")).to_have_count(0)


def test_code_keeps_the_options_while_the_message_is_empty(chat: Page) -> None:
    chat.get_by_label("Message").fill("")
    chat.get_by_label("Temperature").fill("0.5")
    expect(chat.locator("#code-panel")).to_contain_text(re.compile(r"temperature\W+0\.5"))


def test_enter_sends_no_option_that_cannot_be_read(
    chat: Page, generator: ScriptedGenerator
) -> None:
    calls = len(generator.calls)
    temperature = chat.get_by_label("Temperature")
    temperature.fill("")
    temperature.press_sequentially("1e")  # the browser gives an empty value to the page
    chat.get_by_label("Message").fill("Hello")
    chat.get_by_label("Message").press("Enter")
    expect(temperature).to_be_focused()
    assert len(generator.calls) == calls


def test_error_within_a_stream_keeps_the_text_before(
    chat: Page, visitor: Visitor, generator: ScriptedGenerator
) -> None:
    generator.chunks = [CHUNKS[0], EngineFailed("the engine failed")]
    send(chat)
    expect(chat.locator(".problem")).to_contain_text("the engine failed")
    expect(chat.locator(".by-model")).to_have_text(" a")
    expect(chat.get_by_label("Message")).to_have_value("Hello")
    expect(chat.get_by_role("button", name="Send")).to_be_enabled()
    visitor.snap("chat-error")


def test_connection_lost_during_a_stream_is_said(chat: Page, visitor: Visitor) -> None:
    shown = threading.Event()

    def answer_half() -> None:
        peer, _ = listening.accept()
        with peer:
            peer.recv(65_536)
            peer.sendall(HALF_STREAM)
            shown.wait(TIMEOUT_S)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as threads:
        listening.settimeout(TIMEOUT_S)
        answering = threads.submit(answer_half)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        chat.route("**/v1/chat/completions", lambda route: route.continue_(url=url))
        send(chat)
        expect(chat.locator(".by-model")).to_have_text(" a")
        with chat.expect_console_message(lambda message: message.type == "error"):
            shown.set()
            answering.result()
    expect(chat.locator(".turn .problem")).to_contain_text("cannot be reached")
    expect(chat.locator(".by-model")).to_have_text(" a")
    expect(chat.get_by_label("Message")).to_have_value("Hello")
    visitor.console.clear()  # remove the expected error of the lost connection


def test_message_without_an_answer_is_put_back(chat: Page, generator: ScriptedGenerator) -> None:
    generator.refusal = Overloaded("The generation queue is full")
    send(chat)
    expect(chat.locator(".problem")).to_contain_text("The generation queue is full")
    message = chat.get_by_label("Message")
    expect(message).to_have_value("Hello")
    generator.refusal = None
    message.press("Enter")
    expect(chat.locator(".by-model").last).to_have_text(TEXT)
    expect(message).to_have_value("")
    assert [said["content"] for said in generator.calls[-1].prompt.messages] == ["Hello"]


def test_invalid_schema_is_named_before_anything_is_sent(
    chat: Page, generator: ScriptedGenerator
) -> None:
    chat.get_by_label("JSON schema of the answer").fill("{")
    send(chat)
    expect(chat.locator(".problem")).to_contain_text("not valid JSON")
    assert generator.calls == []
    expect(chat.get_by_label("Message")).to_have_value("Hello")


def test_streaming_shifts_no_layout(chat: Page, generator: ScriptedGenerator) -> None:
    words = [Chunk(f" word{n}", (Token(n, f" word{n}", -1.0),)) for n in range(WORDS)]
    generator.chunks = [*words, Chunk("", (), ending(tokens=WORDS))]
    generator.pause_s = PAUSE_S
    chat.evaluate(OBSERVE_SHIFTS)
    send(chat)
    expect(chat.locator(".turn .facts")).to_contain_text(f"{WORDS} tokens")
    assert chat.evaluate("window.shifted") == []
    # The transcript has scrolled to the end of the text.
    room = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
    assert chat.locator(".transcript").first.evaluate(room) < 2


def test_completion_continues_the_text(visitor: Visitor, generator: ScriptedGenerator) -> None:
    page = visitor.open("play/completion")
    visitor.fill({"Text to continue": "Once upon"})
    visitor.run()
    expect(page.locator(".by-model")).to_have_text(f"Once upon{TEXT}")
    visitor.snap("completion")


def test_white_space_at_the_ends_of_a_text_is_sent(
    visitor: Visitor, generator: ScriptedGenerator
) -> None:
    prompt = "    def f():\n        "
    visitor.open("play/completion")
    visitor.fill({"Text to continue": prompt})
    visitor.run()
    assert generator.calls[-1].prompt == prompt


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["defaults", "options"])
@pytest.mark.parametrize(
    ("view", "client"),
    [("chat", "huggingface_hub"), ("chat", "openai"), ("completion", "openai")],
)
def test_code_sends_the_request_of_the_page(
    visitor: Visitor,
    generator: ScriptedGenerator,
    view: str,
    client: str,
    options: dict[str, str],
) -> None:
    page = visitor.open(f"play/{view}")
    page.locator("details.options").evaluate("e => { e.open = true }")
    page.locator("form.form textarea").first.fill("Once upon\n")
    visitor.fill(options)
    page.get_by_role("tab", name=client).click()
    exec(page.locator("#code-panel code").text_content() or "", {})
    visitor.run()
    by_code, by_page = generator.calls[-2:]
    assert (by_code.prompt, by_code.options) == (by_page.prompt, by_page.options)


def test_client_without_the_request_names_another_client(visitor: Visitor) -> None:
    page = visitor.open("play/completion")
    page.get_by_role("tab", name="huggingface_hub").click()
    expect(page.locator("#code-panel")).to_have_text(
        "# huggingface_hub has no method for this request; use openai."
    )
