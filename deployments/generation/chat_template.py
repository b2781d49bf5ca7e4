"""A model's chat template: Jinja of foreign origin, run within bounds.

The sandbox keeps templates from everything but what they are given. Loops and calls are counted,
so that none goes on for ever; the text is bounded as it grows. What remains is memory: strings that
an expression pads or doubles over and over may still take all there is. Templates are sealed with
their model, by whoever chose it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deployments.errors import InputTooLong, InvalidField
from deployments.generation.messages import Chat

MOST_CHARACTERS = 4_000_000  # of a rendered conversation
# Turns of loops in one rendering, half a second of them or so; a call is worth several. Templates
# take a few for each message, and some look at every message for each of them.
MOST_STEPS = 500_000
STEPS_OF_CALL = 10
MOST_REASON_CHARACTERS = 300


class ChatTemplate:
    """Turns conversations into the text a model was trained to continue. Not thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are what the template may name, such as {"bos_token": "<s>"}.

        Raises InvalidField for a template that is none: conversations are what it cannot serve.
        """
        self._environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self._special_tokens = dict(special_tokens)
        try:
            self._template = self._environment.from_string(source)
        except Exception as exc:  # nested deeply enough, also Python's own about its source
            raise _refusal(exc) from exc

    def render(self, chat: Chat) -> str:
        """The prompt, up to where the model is to go on.

        Raises InvalidField with the template's reason where it refuses the conversation, and
        InputTooLong beyond MOST_CHARACTERS.
        """
        self._environment.steps_left = MOST_STEPS
        pieces: list[str] = []
        length = 0
        for piece in self._pieces(chat):
            length += len(piece)
            if length > MOST_CHARACTERS:
                raise InputTooLong(
                    f"`messages` make a prompt of more than {MOST_CHARACTERS} characters",
                    field="messages",
                )
            pieces.append(piece)
        return "".join(pieces)

    def _pieces(self, chat: Chat) -> Iterator[str]:
        try:
            yield from self._template.generate(
                **self._special_tokens,
                messages=list(chat.messages),
                tools=list(chat.tools) or None,
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as exc:  # whatever Python raises in an expression of the template
            raise _refusal(exc) from exc


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with what templates of the hub expect, counting their steps."""

    steps_left = MOST_STEPS
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _to_json
        self.filters["counted"] = self._counted
        del self.globals["lipsum"]  # any amount of text in one call
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template comes through here."""
        self._count(STEPS_OF_CALL)
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses to make numbers or strings that no prompt can need."""
        if operator == "**":
            raise SecurityError("chat templates may not compute powers")
        for factor, times in ((left, right), (right, left)):
            if isinstance(factor, Sized) and len(factor) * times > MOST_CHARACTERS:
                raise SecurityError(f"a string of more than {MOST_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        return template

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count(1)
            yield item

    def _count(self, steps: int) -> None:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise TemplateError(f"the chat template takes more than {MOST_STEPS} steps")


class _Generation(Extension):
    """Templates mark what a model is trained on; for a prompt the marks mean nothing."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(reason: str) -> None:
    raise TemplateError(reason)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own writes for HTML, with `<` escaped.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refusal(reason: Exception) -> InvalidField:
    told = " ".join(str(reason).split())[:MOST_REASON_CHARACTERS] or type(reason).__name__
    return InvalidField(f"`messages` cannot be made a prompt: {told}", field="messages")
