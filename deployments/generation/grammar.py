"""Constrained decoding: the tokens that a JSON schema or a regular expression allows.

llguidance computes the masks, with limits on time and memory. A grammar that is invalid or too
complex is rejected as InvalidField with the error of llguidance. Some grammars take minutes or
gigabytes to compile. A trial in a child process finds them first; see grammar_trials.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import OrderedDict
from math import inf
from threading import Lock
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from numpy.typing import NDArray

from deployments.errors import InvalidField
from deployments.generation.grammar_trials import (
    FULL,
    GrammarTrials,
    Trial,
    TrialLimits,
    build_matcher,
)
from deployments.generation.json_schema import normalize_schema
from deployments.messages import Grammar

MAX_CHARACTERS = 65_536  # per schema or regular expression
MAX_REASON_CHARACTERS = 300
ANY_OBJECT = '{"type": "object"}'
# At most one space where JSON allows any amount of whitespace. Unlimited whitespace would let an
# answer continue forever.
WHITESPACE = "[ ]?"
# `\d` and `\s` match ASCII characters only, because many programs parse no others.
ASCII_CLASSES = "ds"
# Maximum number of cached trial results. Most clients send the same few schemas.
MAX_TRIALS = 1_024
# Seconds after which a grammar that exceeded its limits is tried again. A second trial may succeed:
# the kernel also kills a trial if the host has no memory left, which looks like an exceeded limit.
RETRY_COSTLY_S = 60.0


class GrammarTooCostly(InvalidField):
    """Error for a grammar whose compilation exceeds the limit of time or of memory."""


class Constraint:
    """The grammar of one answer, and the state after its tokens so far. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, memory_bytes: int = 0) -> None:
        self.memory_bytes = memory_bytes  # size of the compiled grammar, measured by the trial
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def is_complete(self) -> bool:
        """Whether the text must end, because no further token can follow."""
        return self._matcher.is_stopped()

    def compute_allowed(self) -> NDArray[np.bool_]:
        """Return a mask [V] of the tokens that may follow. End tokens may follow a complete text.

        Tokens of the model that the tokenizer lacks are not allowed. Raises InvalidField if the
        grammar became too complex.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """Advance by an allowed token. Raises InvalidField as `compute_allowed` does."""
        if not self._matcher.consume_token(token):
            self._check()
            raise AssertionError(f"bug: the grammar does not allow token {token}")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _invalid_grammar(self._matcher.get_error())


class _CachedTrial(NamedTuple):
    trial: Trial | None  # None: the grammar exceeded the limits
    expires_s: float  # time.monotonic


class GrammarCompiler:
    """Compiler of grammars for one tokenizer. Thread-safe."""

    def __init__(
        self, tokenizer_json: str, vocabulary: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """Set `vocabulary` to the number of logits. The tokenizer may have fewer tokens."""
        self._tokenizer_json = tokenizer_json
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._unsupported: str | None = None  # why llguidance does not support the tokenizer
        self._lock = Lock()
        self._trials = GrammarTrials(tokenizer_json, eos_token_ids)
        # Trial results by digest of the source and by limits, least recently used first.
        self._results: OrderedDict[tuple[bytes, TrialLimits], _CachedTrial] = OrderedDict()

    def open(self) -> None:
        """Prepare the tokenizer in advance; otherwise the first grammar would wait for it.

        Holds the GIL for some tenths of a second, for over a second with a large vocabulary. Raises
        InvalidField if llguidance does not support the tokenizer, and so does each `compile`.
        """
        self._get_tokenizer()

    def close(self) -> None:
        """End the process that runs the trials."""
        self._trials.close()

    def compile(self, grammar: Grammar, limits: TrialLimits = FULL) -> Constraint:
        """Compile a grammar within the time and the memory that `limits` allow.

        Raises InvalidField for an invalid grammar, GrammarTooCostly beyond `limits`, and the errors
        of GrammarTrials.run.
        """
        if len(grammar.value) > MAX_CHARACTERS:
            raise _invalid_grammar(
                f"it has {len(grammar.value)} characters; the maximum is {MAX_CHARACTERS}"
            )
        tokenizer, source = self._get_tokenizer(), _build_source(grammar)
        trial = self._try(source, limits)
        if trial is None:
            raise GrammarTooCostly(
                f"`grammar` cannot be used: compiling it takes more than {limits.cpu_s:g} s or "
                f"{limits.memory_bytes >> 20} MB, which are the limits. Simplify it, for example "
                "by lower counts and by a smaller `multipleOf`.",
                field="grammar",
            )
        if trial.error is not None:
            raise _invalid_grammar(trial.error)
        matcher = build_matcher(tokenizer, source)
        if matcher.is_error():
            raise _invalid_grammar(matcher.get_error())
        return Constraint(matcher, self._vocabulary, trial.memory_bytes)

    def _try(self, source: str, limits: TrialLimits) -> Trial | None:
        key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest(), limits
        with self._lock:
            cached = self._results.get(key)
            if cached is not None and time.monotonic() < cached.expires_s:
                self._results.move_to_end(key)
                return cached.trial
        trial = self._trials.run(source, limits)
        expires_s = time.monotonic() + RETRY_COSTLY_S if trial is None else inf
        with self._lock:
            self._results[key] = _CachedTrial(trial, expires_s)
            self._results.move_to_end(key)
            if len(self._results) > MAX_TRIALS:
                self._results.popitem(last=False)
        return trial

    def _get_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None and self._unsupported is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._tokenizer_json, eos_token=list(self._eos_token_ids)
                    )
                except ValueError as exc:
                    self._unsupported = str(exc)
            if self._tokenizer is None:
                raise _invalid_grammar(
                    f"the tokenizer of this model does not support grammars: {self._unsupported}"
                )
            return self._tokenizer


def _build_source(grammar: Grammar) -> str:
    """Convert the grammar to a format of llguidance.

    Raises InvalidField for an empty regular expression, and for a text that is not a JSON schema.
    The compilation finds other errors.
    """
    if grammar.kind == "regex":
        if not grammar.value:
            raise _invalid_grammar("the regular expression is empty")
        return f"start: /{regex_to_lark(grammar.value, ASCII_CLASSES)}/"
    schema = ANY_OBJECT if grammar.kind == "json_object" else _read_schema(grammar.value)
    try:
        return LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as exc:
        raise _invalid_grammar(f"not a JSON schema: {exc}") from exc


def _read_schema(text: str) -> str:
    """Return the schema with the types that it implies. llguidance reports what is not JSON."""
    try:
        return json.dumps(normalize_schema(json.loads(text)))
    except (ValueError, RecursionError):
        return text


def _invalid_grammar(reason: str) -> InvalidField:
    """Return an error with the reason of llguidance in one line.

    If a line of the reason begins with `error:`, use only the rest of that line. Cut the reason to
    MAX_REASON_CHARACTERS.
    """
    sentence = re.search("^error: (.+)", reason, flags=re.MULTILINE)
    text = sentence[1] if sentence else reason.removesuffix("<non-verbose/>")
    if text.startswith("NoExtension"):
        text = "no text matches it"
    text = " ".join(text.split())[:MAX_REASON_CHARACTERS]
    return InvalidField(f"`grammar` cannot be used: {text}", field="grammar")
