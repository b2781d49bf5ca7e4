"""Text that must follow a JSON schema or a regular expression: which tokens may come next.

llguidance does the work, within its own limits on time and memory. A grammar that is wrong, or that
turns out to be too complex, is the request's fault and is refused with the library's reason.
"""

from __future__ import annotations

import re
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from numpy.typing import NDArray

from deployments.errors import EngineFailed, InvalidField
from deployments.generation.messages import Grammar

MOST_CHARACTERS = 65_536  # of a schema or a regular expression
MOST_REASON_CHARACTERS = 300
ANY_OBJECT = '{"type": "object"}'
# At most one space where JSON allows any: what models write anyway, and no way to go on for ever.
WHITESPACE = "[ ]?"
# In regular expressions `\d` and `\s` are the characters that programs read as such, not all that
# Unicode has.
ASCII_CLASSES = "ds"
# A quarter or less of what the library allows. One mask then takes at most about 5 ms, because all
# rows of a batch wait for it, and a grammar of nested counts about 20 MB and half a second.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    verbose_errors=False,  # they would tell the state of the parser
)


class Constraint:
    """Where one answer stands in its grammar. One thread at a time."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may follow, [V]; end tokens where the text may end.

        Tokens of the model that the tokenizer does not know may not. Raises InvalidField when the
        grammar got too complex.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on with a token that was allowed. Raises InvalidField as `allowed` does."""
        if not self._matcher.consume_token(token):
            self._check()
            raise EngineFailed(f"token {token} is outside of its grammar; this is a bug")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Safe to share between threads."""

    def __init__(
        self, tokenizer_json: str, vocabulary: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """For logits of `vocabulary` tokens, V, which may be more than the tokenizer has."""
        self._tokenizer_json = tokenizer_json
        self._vocabulary = vocabulary
        self._end_tokens = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._opening = Lock()

    def open(self) -> None:
        """Prepare the tokenizer, which the first grammar would wait for.

        It takes some tenths of a second, in which no other thread of the process runs. Raises
        InvalidField for a kind of tokenizer that cannot follow grammars.
        """
        self._opened()

    def compile(self, grammar: Grammar) -> Constraint:
        """The beginning of a text that follows `grammar`.

        Takes milliseconds, up to about a second for the most complex ones that are accepted. Raises
        InvalidField.
        """
        if len(grammar.value) > MOST_CHARACTERS:
            raise _refusal(f"{len(grammar.value)} characters, at most {MOST_CHARACTERS} are read")
        matcher = LLMatcher(self._opened(), _source(grammar), log_level=0, limits=LIMITS)
        constraint = Constraint(matcher, self._vocabulary)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        # Some grammars turn out to allow nothing, or too much, only here; and the first mask is the
        # slowest by far.
        constraint.allowed()
        return constraint

    def _opened(self) -> LLTokenizer:
        with self._opening:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._tokenizer_json, eos_token=list(self._end_tokens)
                    )
                except ValueError as exc:
                    raise _refusal(f"not for this model's tokenizer: {exc}") from exc
            return self._tokenizer


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Raises InvalidField."""
    if grammar.kind == "regex":
        if not grammar.value:
            raise _refusal("the regular expression is empty")
        return f"start: /{regex_to_lark(grammar.value, ASCII_CLASSES)}/"
    schema = ANY_OBJECT if grammar.kind == "json_object" else grammar.value
    try:
        return LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as exc:
        raise _refusal(f"not a JSON schema: {exc}") from exc


def _refusal(reason: str) -> InvalidField:
    """The library's reason in one line: of a long report, the sentence that says what is wrong."""
    named = re.search("^error: (.+)", reason, flags=re.MULTILINE)
    told = named[1] if named else reason.removesuffix("<non-verbose/>")
    if told.startswith("NoExtension"):
        told = "there is no text that follows it"
    told = " ".join(told.split())[:MOST_REASON_CHARACTERS]
    return InvalidField(f"`grammar` cannot be followed: {told}", field="grammar")
