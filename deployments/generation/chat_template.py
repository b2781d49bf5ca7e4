"""Chat templates: untrusted Jinja, rendered in a sandbox with limits.

Templates can access only their arguments. Their own length, loop iterations, calls and CPU time are
limited, and the length of the text is limited while it grows. CPU time is checked only in loops and
calls. Neither the memory nor the time of a single expression is limited: expressions that pad or
double strings, or compare nested lists, can still exhaust them.
Templates belong to the stored model; clients cannot send templates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Set, Sized
from datetime import datetime
from functools import cached_property
from secrets import token_hex
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment

from deployments.errors import InputTooLong, InvalidField
from deployments.generation.harmony import adapt_messages, adapt_tools, is_harmony
from deployments.generation.reasoning import find_named_marks
from deployments.messages import Chat

# Length of a template, which limits the statements outside of loops. Templates of models have up to
# 30,000 characters.
MAX_SOURCE_CHARACTERS = 100_000
MAX_CHARACTERS = 4_000_000  # per rendered conversation
# Maximum loop iterations per rendering, which take about 0.5 s if their expressions are cheap. A
# call counts as STEPS_PER_CALL iterations. Templates need a few iterations per message, and some
# iterate over all messages for each message.
MAX_STEPS = 500_000
STEPS_PER_CALL = 10
# CPU time per rendering. It limits expensive expressions in loops, such as searches of long lists.
MAX_CPU_S = 2.0
# Product of two integers. Larger factors take long, and Python cannot interrupt a multiplication.
MAX_PRODUCT_BITS = 256
MAX_REASON_CHARACTERS = 300
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
# A conversation with a tool, to find out whether a template uses tools.
PROBE = Chat(({"role": "user", "content": "Hello"},), tools=(_PROBE_TOOL,))


class _Kind(NamedTuple):
    """Messages whose contents a template reads in one form."""

    role: str
    has_calls: bool


class ChatTemplate:
    """Template that renders conversations in the training format of a model. Not thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template. `special_tokens` are variables, such as {"bos_token": "<s>"}.

        Raises InvalidField for an invalid or too long template. The model can still answer text
        prompts, so the caller should reject only requests with messages.
        """
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise InvalidField(
                f"the chat template has {len(source)} characters; the limit is "
                f"{MAX_SOURCE_CHARACTERS}. Send a `prompt` to the completions route instead",
                field="messages",
            )
        self._environment = _TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        self.reasoning_marks = find_named_marks(source)
        self.is_harmony = is_harmony(source)  # the format of GPT-OSS
        self._special_tokens = dict(special_tokens)
        self._reads_parts: dict[_Kind, bool] = {}  # kinds that are not known are missing
        try:
            self._template = self._environment.from_string(source)
        except Exception as exc:  # deep nesting also raises errors of the Python compiler
            raise _invalid_messages(exc) from exc

    def render(self, chat: Chat, *, add_generation_prompt: bool = True) -> str:
        """Render the prompt of the next answer, or the messages without the start of an answer.

        Raises InvalidField with the error of the template, InputTooLong beyond MAX_CHARACTERS.
        """
        if self.is_harmony:
            messages = [dict(message) for message in adapt_messages(chat.messages)]
        else:
            self._learn_forms(chat)
            messages = list(map(self._adapt_content, chat.messages))
        chat = chat._replace(messages=tuple(messages))
        return self._render_adapted(chat, add_generation_prompt=add_generation_prompt)

    def _learn_forms(self, chat: Chat) -> None:
        """Find out for kinds of messages whether the template reads their contents as parts.

        Many templates for images read lists of parts only: from a text, they drop all characters,
        or fail. A template may do so for some roles. A kind that it shows in neither form has
        texts, until another conversation tells. Many templates show no content beside tool calls,
        so this is remembered of messages with calls.
        """
        texts = (message for message in chat.messages if isinstance(message["content"], str))
        unknown = set(map(_find_kind, texts)) - self._reads_parts.keys()
        renders, found = False, True
        while unknown and found:  # what is found of some kinds may be needed for the others
            found = False
            for reads_parts in (False, True):
                shown = self._find_shown(chat, unknown, reads_parts=reads_parts)
                if shown is not None:
                    self._reads_parts |= dict.fromkeys(shown, reads_parts)
                    renders, found, unknown = True, found or bool(shown), unknown - shown
        if renders:
            hidden = (kind for kind in unknown if kind.has_calls)
            self._reads_parts |= dict.fromkeys(hidden, False)

    def _find_shown(self, chat: Chat, kinds: Set[_Kind], *, reads_parts: bool) -> set[_Kind] | None:
        """Return those of `kinds` whose contents the prompt has if they have this form.

        Return None if the template fails.
        """
        probes = {kind: f"{token_hex(8)};" for kind in kinds}  # texts that no request can contain
        messages = tuple(
            self._adapt_content(message)
            if (probe := probes.get(_find_kind(message))) is None
            else _set_content(message, probe, as_parts=reads_parts)
            for message in chat.messages
        )
        try:
            prompt = self._render_adapted(
                chat._replace(messages=messages), add_generation_prompt=True
            )
        except (InvalidField, InputTooLong):
            return None
        # A list that is printed as a whole has the text in quotation marks.
        return {
            kind
            for kind, text in probes.items()
            if text in prompt and not (reads_parts and f"'{text}'" in prompt)
        }

    def _adapt_content(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message["content"], str):  # builds also try lists of their own
            return dict(message)
        as_parts = self._reads_parts.get(_find_kind(message), False)
        return _set_content(message, message["content"], as_parts=as_parts)

    def _render_adapted(self, chat: Chat, *, add_generation_prompt: bool) -> str:
        self._environment.start_counting()
        pieces: list[str] = []
        length = 0
        for piece in self._pieces(chat, add_generation_prompt=add_generation_prompt):
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise InputTooLong(
                    f"`messages` render to more than {MAX_CHARACTERS} characters; shorten them",
                    field="messages",
                )
            pieces.append(piece)
        return "".join(pieces)

    def ignores_tools(self, chat: Chat) -> bool:
        """Return whether the prompt of `chat` is the same without its tools.

        If the template uses the tool of PROBE, `chat` is not rendered again: it counts as used.
        """
        return self._ignores_tools_of_probe and self._is_same_without_tools(chat)

    @cached_property
    def _ignores_tools_of_probe(self) -> bool:
        return self._is_same_without_tools(PROBE)

    def _is_same_without_tools(self, chat: Chat) -> bool:
        try:
            return self.render(chat) == self.render(chat._replace(tools=()))
        except (InvalidField, InputTooLong):
            return False

    def _pieces(self, chat: Chat, *, add_generation_prompt: bool) -> Iterator[str]:
        try:
            yield from self._template.generate(
                {**dict(chat.variables), **self._special_tokens},
                messages=list(chat.messages),
                tools=(adapt_tools(chat.tools) if self.is_harmony else list(chat.tools)) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as exc:  # expressions of a template can raise any exception
            raise _invalid_messages(exc) from exc


class _TemplateSandbox(ImmutableSandboxedEnvironment):
    """Sandbox with the functions that templates on Hugging Face expect.

    It limits the loop iterations, calls and CPU time of a rendering.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _to_json
        self.filters["count_turns"] = self._count_turns
        del self.globals["lipsum"]  # returns text of any length
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.start_counting()

    def start_counting(self) -> None:
        """Start a rendering, in the current thread."""
        self._steps_left = MAX_STEPS
        self._end_cpu_s = time.thread_time() + MAX_CPU_S

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count a call. Jinja routes every call of a template through this method."""
        self._count(STEPS_PER_CALL)
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Reject powers, products of large integers, and repetitions of more than MAX_RANGE items.

        The items of a string are its characters.
        """
        if operator == "**":
            raise SecurityError("chat templates may not compute powers")
        are_integers = isinstance(left, int) and isinstance(right, int)
        if are_integers and left.bit_length() + right.bit_length() > MAX_PRODUCT_BITS:
            raise SecurityError(f"a product has more than {MAX_PRODUCT_BITS} bits")
        for factor, times in ((left, right), (right, left)):
            if isinstance(factor, Sized) and len(factor) * times > MAX_RANGE:
                raise SecurityError(f"a repetition has more than {MAX_RANGE} characters or items")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, "count_turns", [], [], None, None, lineno=loop.lineno
            )
        return template

    def _count_turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count(1)
            yield item

    def _count(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TemplateError(f"it takes more than {MAX_STEPS} steps")
        # Not at every iteration, because reading this clock may take microseconds.
        is_due = self._steps_left % STEPS_PER_CALL < steps
        if is_due and time.thread_time() > self._end_cpu_s:
            raise TemplateError(f"it takes more than {MAX_CPU_S} s of CPU time")


class _GenerationTag(Extension):
    """The tag {% generation %} marks training targets; it does not affect a prompt."""

    tags = {"generation"}  # noqa: RUF012  declared as in Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _find_kind(message: Mapping[str, Any]) -> _Kind:
    return _Kind(message["role"], has_calls=bool(message.get("tool_calls")))


def _set_content(message: Mapping[str, Any], text: str, *, as_parts: bool) -> dict[str, Any]:
    """Return the message with this content, as a text or as a list of one part."""
    return {**message, "content": [{"type": "text", "text": text}] if as_parts else text}


def _raise(reason: str) -> None:
    raise TemplateError(reason)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes `<` for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _invalid_messages(reason: Exception) -> InvalidField:
    text = " ".join(str(reason).split())[:MAX_REASON_CHARACTERS] or type(reason).__name__
    return InvalidField(f"the chat template rejects `messages`: {text}", field="messages")
