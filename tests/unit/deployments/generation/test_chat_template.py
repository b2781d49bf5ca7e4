"""Chat templates that read contents as lists of parts, as those of models with images do."""

from __future__ import annotations

import pytest

from deployments.errors import InvalidField
from deployments.generation.chat_template import ChatTemplate
from deployments.messages import Chat

# Such a template of SmolVLM's kind loses the characters of a text without an error.
PARTS = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'][0]['type'] == 'image' %}<image>{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %};{% endfor %}"
)
TEXTS = "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }};{% endfor %}"
BOTH = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}!{% endfor %}{% endif %};{% endfor %}"
)
TALK = Chat(
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": ""},
    )
)


@pytest.mark.parametrize("source", [PARTS, TEXTS, BOTH])
def test_template_gets_contents_in_the_form_that_it_reads(source: str) -> None:
    template = ChatTemplate(source, {})
    for _ in range(2):
        assert template.render(TALK) == "system:Be brief.;user:Hello;assistant:;"


def test_template_that_fails_for_texts_gets_parts() -> None:
    source = f"{{% if messages[0]['content'] is string %}}{{{{ 1 / 0 }}}}{{% endif %}}{PARTS}"
    assert ChatTemplate(source, {}).render(TALK).startswith("system:Be brief.;")


@pytest.mark.parametrize("first", ["system", "user"])
def test_each_role_gets_the_form_that_the_template_reads_for_it(first: str) -> None:
    source = (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
        "{% else %}[{{ message['content'] or 'called' }}]{% endif %};{% endfor %}"
    )
    template = ChatTemplate(source, {})
    talk = TALK._replace(messages=(*TALK.messages, {"role": "tool", "content": "42"}))
    if first == "user":
        assert template.render(Chat(TALK.messages[1:2])) == "Hello;"
    assert template.render(talk) == "[Be brief.];Hello;[called];[42];"


def test_template_that_needs_another_role_gets_parts() -> None:
    source = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no') }}{% endif %}" + PARTS
    )
    assert ChatTemplate(source, {}).render(TALK) == "system:Be brief.;user:Hello;assistant:;"


def test_form_is_learned_from_a_later_conversation() -> None:
    source = "{% if messages | length < 2 %}{{ raise_exception('no') }}{% endif %}" + PARTS
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidField, match="rejects `messages`: no"):
        template.render(Chat(TALK.messages[1:2]))
    assert template.render(TALK) == "system:Be brief.;user:Hello;assistant:;"


def test_conversation_that_hides_a_text_decides_nothing_for_others() -> None:
    """Many templates show no content of a message with tool calls."""
    template = ChatTemplate(
        "{% for message in messages %}{% if message['tool_calls'] %}called;{% else %}"
        "{% for part in message['content'] %}{{ part['text'] }};{% endfor %}{% endif %}"
        "{% endfor %}",
        {},
    )
    user, assistant = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
    called = {**assistant, "tool_calls": [{"function": {"name": "wave", "arguments": {}}}]}
    assert template.render(Chat((user, called))) == "Hello;called;"
    assert template.render(Chat((user, assistant))) == "Hello;Hi;"


def test_template_that_reads_neither_form_gets_texts() -> None:
    template = ChatTemplate("{{ messages[0]['content'].upper() }}", {})
    assert template.render(TALK) == "BE BRIEF."
    with pytest.raises(InvalidField, match="rejects `messages`: too short"):
        ChatTemplate("{{ raise_exception('too short') }}", {}).render(TALK)
