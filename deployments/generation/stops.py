"""Search for stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Iterable

from deployments.messages import Token


class StopStrings:
    """Filter that ends a text at the first stop string and holds back text that may begin one.

    The first stop string is the one that ends first. If several end at the same character, the
    longest counts. The result therefore does not depend on how the text is split. The search takes
    one step per character and stop string.
    """

    def __init__(self, stop: tuple[str, ...], *, include_stop_string: bool) -> None:
        """Start with an empty text. With `include_stop_string`, no text is held back."""
        self._matchers = [_Matcher(string) for string in stop if string]
        self._include = include_stop_string
        self._held = ""
        self.found = ""  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text to emit, and whether a stop string occurred. Later text is dropped."""
        if not self._matchers:
            return text, False
        if self.found:
            return "", True
        for end, character in enumerate(text, start=1):
            self.found = max((matcher.step(character) for matcher in self._matchers), key=len)
            if self.found:
                return self._end(self._held + text[:end]), True
        pending = self._held + text
        held = 0 if self._include else max(matcher.matched for matcher in self._matchers)
        emitted = len(pending) - held
        self._held = pending[emitted:]
        return pending[:emitted], False

    def push_tokens(self, tokens: Iterable[Token]) -> tuple[str, bool]:
        """Push the text of `tokens`, without the reasoning.

        A special token has a text only if the server replaces it by one (harmony_splitter.py). A
        stop string is neither in such a text nor across it.
        """
        emitted = ""
        for token in tokens:
            if token.reasoning:
                continue
            if token.special and token.text:
                emitted += self.flush() + token.text
                continue
            text, is_stopped = self.push(token.text)
            emitted += text
            if is_stopped:
                return emitted, True
        return emitted, False

    def flush(self) -> str:
        """Return the held-back text, at the end of a text; "" after a stop string."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held

    def _end(self, pending: str) -> str:
        self._held = ""
        # Without `_include`, `pending` has the whole stop string: its beginning was held back.
        return pending if self._include else pending[: -len(self.found)]


class _Matcher:
    """Incremental Knuth-Morris-Pratt search for one stop string."""

    __slots__ = ("_fallbacks", "_string", "matched")

    def __init__(self, string: str) -> None:
        self._string = string
        self._fallbacks = _compute_fallbacks(string)
        self.matched = 0  # length of the longest prefix of the string that ends the text

    def step(self, character: str) -> str:
        """Read a character. Return the string if it is now complete, else ""."""
        string, matched = self._string, self.matched
        while matched and string[matched] != character:
            matched = self._fallbacks[matched]
        if string[matched] == character:
            matched += 1
        self.matched = matched
        return string if matched == len(string) else ""


def _compute_fallbacks(string: str) -> list[int]:
    """Return the fallback lengths f[n] for n from 0 to the length of the string.

    f[n] is the length of the longest proper prefix of string[:n] that is also its suffix.
    """
    fallbacks = [0, 0]
    for character in string[1:]:
        matched = fallbacks[-1]
        while matched and string[matched] != character:
            matched = fallbacks[matched]
        fallbacks.append(matched + (string[matched] == character))
    return fallbacks
