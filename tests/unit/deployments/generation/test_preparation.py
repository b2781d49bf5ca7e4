from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding, processors

from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import (
    CHAT_TEMPLATE_NAME,
    TOKENIZER_NAME,
    TOOL_TEMPLATE_NAME,
)
from deployments.engines.decoder import DecoderInfo
from deployments.errors import (
    ArtifactError,
    EmptyInput,
    InputTooLong,
    InvalidField,
    ServeError,
    UnknownToken,
)
from deployments.generation import chat_template
from deployments.generation.beam_search import BeamSearchJob
from deployments.generation.chat_template import MAX_CHARACTERS
from deployments.generation.job import Job, SamplingJob
from deployments.generation.preparation import PromptTokenizer, RequestPreparer
from deployments.messages import (
    BeamSearchParams,
    Chat,
    GenerationCall,
    GenerationOptions,
    Prompt,
)
from deployments.registry import ModelRegistry
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.fakes import far_deadline
from tests.support.small_tokenizers import END, START, byte_level

TOKENIZER = byte_level()
START_ID, END_ID = TOKENIZER.token_to_id(START), TOKENIZER.token_to_id(END)
# ChatML, a common chat template, with the special tokens of this tokenizer.
CHAT_ML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ bos_token + 'system\\nBe brief.' + eos_token }}
    {% endif %}
{{ bos_token + message['role'] + '\\n' + message.content | trim + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
{{- bos_token + 'assistant\\n' }}
{%- endif %}
"""
HELLO = Chat(({"role": "user", "content": "hello"},))


def reader(directory: Path, template: str | None = CHAT_ML) -> PromptTokenizer:
    """Return a prompt tokenizer that prepends START to every text, but not to chats."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, START_ID)]
    )
    tokenizer.save(str(directory / TOKENIZER_NAME))
    if template is not None:
        (directory / CHAT_TEMPLATE_NAME).write_text(template, encoding="utf-8")
    special = {"bos_token": START, "eos_token": END}
    generation_config = GenerationConfig(
        layers=1, kv_heads=1, head_dim=8, eos_token_ids=(END_ID,), special_tokens=special
    )
    return PromptTokenizer(directory, generation_config)


def render_prompt(directory: Path, chat: Chat, template: str = CHAT_ML) -> str:
    """Return the text of the prompt tokens of a conversation."""
    ids = reader(directory, template).tokenize(chat)
    text: str = TOKENIZER.decode(ids, skip_special_tokens=False)
    return text


def build_chat(*contents: str) -> Chat:
    roles = ("user", "assistant")
    return Chat(tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(contents)))


def test_text_gets_special_tokens(tmp_path: Path) -> None:
    own = TOKENIZER.encode("the river").ids
    assert reader(tmp_path).tokenize("the river") == [START_ID, *own]


class BatchTokenizer:
    """Tokenizer without `encode`, which holds the GIL during the whole text."""

    def encode_batch_fast(self, texts: list[str], **options: Any) -> list[Encoding]:
        found: list[Encoding] = TOKENIZER.encode_batch_fast(texts, **options)
        return found


@pytest.mark.parametrize("prompt", ["the river", HELLO])
def test_prompts_are_tokenized_without_the_gil(prompt: Prompt, tmp_path: Path) -> None:
    prompts = reader(tmp_path, "{{ messages[0].content }}")
    prompts.tokenizer = BatchTokenizer()
    assert prompts.tokenize(prompt)


def test_token_ids_are_unchanged(tmp_path: Path) -> None:
    last = TOKENIZER.get_vocab_size() - 1
    assert reader(tmp_path).tokenize((5, 0, last, 5)) == [5, 0, last, 5]


@pytest.mark.parametrize("unknown", [-1, TOKENIZER.get_vocab_size(), 2**70])
def test_token_ids_beyond_the_vocabulary_are_rejected(unknown: int, tmp_path: Path) -> None:
    with pytest.raises(UnknownToken, match=str(unknown)) as raised:
        reader(tmp_path).tokenize((5, unknown, 7))
    assert raised.value.field == "prompt"


@pytest.mark.parametrize(
    ("prompt", "field"), [("", "prompt"), ((), "prompt"), (Chat(()), "messages")]
)
def test_empty_prompt_is_rejected(prompt: Any, field: str, tmp_path: Path) -> None:
    with pytest.raises(EmptyInput) as raised:
        reader(tmp_path).tokenize(prompt)
    assert raised.value.field == field


def test_chat_rendered_to_empty_text_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(EmptyInput) as raised:
        reader(tmp_path, "{# nothing #}").tokenize(HELLO)
    assert raised.value.field == "messages"


def test_chat_with_tools_is_rendered_by_the_template_for_tools(tmp_path: Path) -> None:
    chat = HELLO._replace(tools=({"name": "now"},))
    template = "{{ tools | length if tools else 'no' }} tools"
    assert render_prompt(tmp_path, chat, template) == "1 tools"
    (tmp_path / TOOL_TEMPLATE_NAME).parent.mkdir()
    (tmp_path / TOOL_TEMPLATE_NAME).write_text("use {{ tools[0].name }}", encoding="utf-8")
    assert render_prompt(tmp_path, chat, template) == "use now"
    assert render_prompt(tmp_path, HELLO, template) == "no tools"


def test_chat_is_rendered_by_the_template(tmp_path: Path) -> None:
    assert render_prompt(tmp_path, build_chat("Hi <b>", "Oh é 🙂.", " What? ")) == (
        f"{START}system\nBe brief.{END}\n"
        f"{START}user\nHi <b>{END}\n{START}assistant\nOh é 🙂.{END}\n"
        f"{START}user\nWhat?{END}\n{START}assistant\n"
    )


def test_system_message_replaces_the_template_default(tmp_path: Path) -> None:
    chat = Chat(({"role": "system", "content": "Rhyme."}, *HELLO.messages))
    assert render_prompt(tmp_path, chat).startswith(
        f"{START}system\nRhyme.{END}\n{START}user\nhello"
    )


def test_chat_gets_no_additional_special_tokens(tmp_path: Path) -> None:
    ids = reader(tmp_path).tokenize(HELLO)
    assert ids[0] == START_ID
    assert ids.count(START_ID) == 3  # one for each of the system, user and assistant turns
    assert ids.count(END_ID) == 2


def test_template_receives_variables_of_the_request_except_its_own(tmp_path: Path) -> None:
    template = "{% if enable_thinking is false %}<think></think>{% endif %}{{ bos_token }}"
    quiet = HELLO._replace(variables=(("enable_thinking", False), ("bos_token", "other")))
    thinking = render_prompt(tmp_path, HELLO, template)
    assert render_prompt(tmp_path, quiet, template) == "<think></think>" + thinking


def test_template_receives_tools(tmp_path: Path) -> None:
    template = (
        "{% if tools is none %}none{% else %}"
        "{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "where", "about": "<é> & more"}}
    chat = Chat(HELLO.messages, (tool,))
    assert render_prompt(tmp_path, HELLO, template) == "none"
    assert render_prompt(tmp_path, chat, template) == '{"name": "where", "about": "<é> & more"}'


WHERE = {"type": "function", "function": {"name": "where"}}
TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "chat", "is_ignored"),
    [
        (CHAT_ML, HELLO._replace(tools=(WHERE,)), True),
        (CHAT_ML, HELLO, False),
        (CHAT_ML, "hello", False),
        (TOOLS + CHAT_ML, HELLO._replace(tools=(WHERE,)), False),
        ("{{ raise_exception('no') }}", HELLO._replace(tools=(WHERE,)), False),
        # Templates that use tools only in some conversations.
        ("{% if documented %}" + TOOLS + "{% endif %}x", HELLO._replace(tools=(WHERE,)), True),
        (
            "{% if documented %}" + TOOLS + "{% endif %}x",
            HELLO._replace(tools=(WHERE,), variables=(("documented", True),)),
            False,
        ),
    ],
)
def test_tools_are_ignored_if_the_template_renders_the_same_without_them(
    template: str, chat: Prompt, is_ignored: bool, tmp_path: Path
) -> None:
    assert reader(tmp_path, template).ignores_tools(chat) is is_ignored


@pytest.mark.parametrize(
    ("arguments", "written"),
    [({"n": 1}, '{"n": 1}'), ('{"n": 1}', '"{\\"n\\": 1}"')],
)
def test_template_receives_tool_call_arguments(
    arguments: Any, written: str, tmp_path: Path
) -> None:
    template = (
        "{% for message in messages %}{% for call in message.tool_calls %}"
        "{{ call.function.name }}({{ call.function.arguments | tojson }})"
        "{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "where", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    before = json.dumps(message)
    assert render_prompt(tmp_path, Chat((message,)), template) == f"where({written})"
    assert json.dumps(message) == before


def test_split_surrogate_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="not valid UTF-8") as caught:
        render_prompt(tmp_path, HELLO, "{{ '\\ud83d' }}")
    assert caught.value.field == "messages"


def test_template_has_the_functions_of_the_hub(tmp_path: Path) -> None:
    template = (
        "{% generation %}{{ 'marked' }}{% endgeneration %} "
        "{{ strftime_now('%Y') }} {{ documents is none }} {{ {'a': [1]} | tojson(indent=1) }} "
        "{% for i in range(9) %}"
        "{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}"
        "{{ i }}{{ loop.last }}{% endfor %} {{ messages | length }} "
        "{% for message in messages %}{{ loop.index }}/{{ loop.length }}{% endfor %}"
    )
    year = datetime.now().year
    assert render_prompt(tmp_path, build_chat("a", "b"), template) == (
        f'marked {year} True {{\n "a": [\n  1\n ]\n}} 0False2False 2 1/22/2'
    )


def test_template_error_is_reported(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidField, match="roles must alternate") as raised:
        reader(tmp_path, template).tokenize(HELLO)
    assert raised.value.field == "messages"


def test_long_repetition_of_a_list_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="more than 100000 characters or items"):
        reader(tmp_path, "{{ [0] * 100001 }}").tokenize(HELLO)


def test_expensive_expressions_in_a_loop_are_bounded_by_cpu_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = "{% set items = [1] * 100000 %}{% for i in range(3000) %}{% set found = 2 in items %}"
    own = reader(tmp_path, f"{search}{{% endfor %}}done")
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.05)
    with pytest.raises(InvalidField, match=r"more than 0\.05 s of CPU time"):
        own.tokenize(HELLO)


def test_long_template_is_rejected(tmp_path: Path) -> None:
    search = "{% set found = 2 in messages %}"  # CPU time is not checked between such statements
    with pytest.raises(InvalidField, match="has 108500 characters; the limit is 100000") as raised:
        reader(tmp_path, search * 3500).tokenize(HELLO)
    assert raised.value.field == "messages"


def test_missing_template_names_the_completions_route(tmp_path: Path) -> None:
    own = reader(tmp_path, template=None)
    with pytest.raises(InvalidField, match=r"no chat template.*completions") as raised:
        own.tokenize(HELLO)
    assert raised.value.field == "messages"
    assert own.tokenize("hello")


HOSTILE = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "appends": "{{ messages.append(1) }}",
    "changes": "{{ messages[0].update({'role': 'system'}) }}",
    "missing": "{{ messages[0].nothing.more }}",
    "divides": "{{ 1 / 0 }}",
    "unfinished": "{% for message in messages %}",
    "unknown": "{{ message | poetry }}",
    "nested": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "includes": "{% include '/etc/passwd' %}",
    "undefined": "{{ nothing | tojson }}",
    "ranges": "{{ range(1000000) | list }}",
    "powers": "{{ 9 ** 9 ** 9 }}",
    "multiplies": "{{ 'x' * 100000000000 }}",
    "squares": "{% set last = namespace(x=10) %}{% for i in range(22) %}"
    "{% set last.x = last.x * last.x %}{% endfor %}done",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "letters": "{% for a in messages[0].content * 9999 %}{% for b in messages[0].content * 9999 %}"
    "{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_hostile_template_is_rejected_in_time(template: str, tmp_path: Path) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidField, match=r"the chat template rejects `messages`: .") as raised:
        reader(tmp_path, template).tokenize(HELLO)
    assert raised.value.field == "messages"
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.join.__self__.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ strftime_now.__code__ }}",
        "{{ messages.__class__ }}{{ self._TemplateReference__context }}",
    ],
)
def test_sandboxed_attributes_are_not_rendered(template: str, tmp_path: Path) -> None:
    with pytest.raises((EmptyInput, InvalidField)):
        reader(tmp_path, template).tokenize(HELLO)


def test_rendered_length_is_limited(tmp_path: Path) -> None:
    template = "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"
    with pytest.raises(InputTooLong, match=str(MAX_CHARACTERS)) as raised:
        reader(tmp_path, template).tokenize(HELLO)
    assert raised.value.field == "messages"


def test_step_limit_is_reset_per_rendering(tmp_path: Path) -> None:
    template = (
        "{% for i in range(90000 if messages | length == 2 else 9) %}"
        "{% for j in range(9) %}{% endfor %}{% endfor %}done"
    )
    own = reader(tmp_path, template)
    for _ in range(2):
        with pytest.raises(ServeError):
            own.tokenize(build_chat("a", "b"))
        assert TOKENIZER.decode(own.tokenize(HELLO)) == "done"


def test_long_chat_stays_within_the_step_limit(tmp_path: Path) -> None:
    chat = build_chat(*(f"number {i}" for i in range(2000)))
    assert render_prompt(tmp_path, chat).count(START) == 2002


def test_missing_tokenizer_file_fails(tmp_path: Path) -> None:
    generation_config = GenerationConfig(layers=1, kv_heads=1, head_dim=8, eos_token_ids=(0,))
    with pytest.raises(ArtifactError):
        PromptTokenizer(tmp_path, generation_config)


def build_job(store: Path, beams: BeamSearchParams | None, slots: int = 4, **options: Any) -> Job:
    """Return the job of a call with `options` to a decoder with `slots` KV slots."""
    seal_tiny_decoder(store)
    model = ModelRegistry(store, ()).find(DECODER)
    info = DecoderInfo("cpu-fake", slots, 90, TOKENIZER.get_vocab_size())
    generation = GenerationOptions(beam_search=beams)
    call = GenerationCall(model.ref, "hello", generation, far_deadline(), **options)
    return RequestPreparer(model, info).build_job(call, None)


@pytest.mark.parametrize("beams", [None, BeamSearchParams(2)])
def test_job_has_the_client_and_the_priority_of_its_call(
    beams: BeamSearchParams | None, tmp_path: Path
) -> None:
    """The queue of the KV slots is fair to clients, and serves low priorities last."""
    job = build_job(tmp_path, beams, client="a", priority=1)
    assert (job.client, job.priority) == ("a", 1)


@pytest.mark.parametrize(("slots", "kind"), [(1, SamplingJob), (3, BeamSearchJob)])
def test_default_beams_of_a_model_are_limited_to_the_kv_slots(
    slots: int, kind: type[Job], tmp_path: Path
) -> None:
    job = build_job(tmp_path, BeamSearchParams(4, is_explicit=False), slots)
    assert (type(job), job.slot_count) == (kind, slots)
