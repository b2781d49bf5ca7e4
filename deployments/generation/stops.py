"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations


class StopStrings:
    """Ends a text at the first stop string, without showing any of it too early.

    The first is the one whose last character comes first, and of several that end together the
    longest: so the pieces in which a text arrives make no difference. Every character is looked at
    once for each stop string.
    """

    def __init__(self, stop: tuple[str, ...], keep: bool) -> None:
        """With `keep` the stop string is part of the text, and nothing need be held back."""
        self._finders = [_Finder(string) for string in stop if string]
        self._keep = keep
        self._held = ""
        self._is_over = False

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string has come; what follows it is dropped."""
        if not self._finders:
            return text, False
        if self._is_over:
            return "", True
        for end, character in enumerate(text, start=1):
            found = max(finder.step(character) for finder in self._finders)
            if found:
                return self._ended(self._held + text[:end], found), True
        whole = self._held + text
        begun = 0 if self._keep else max(finder.matched for finder in self._finders)
        shown = len(whole) - begun
        self._held = whole[shown:]
        return whole[:shown], False

    def rest(self) -> str:
        """What was held back, at the end of a text that no stop string has ended."""
        held, self._held = self._held, ""
        return held

    def _ended(self, whole: str, stop_length: int) -> str:
        self._is_over, self._held = True, ""
        # What is held back is the longest beginning of a stop string, so all of it is in `whole`.
        return whole if self._keep else whole[:-stop_length]


class _Finder:
    """One stop string, and how much of it the text ends with: Knuth, Morris and Pratt's way."""

    __slots__ = ("_fallbacks", "_string", "matched")

    def __init__(self, string: str) -> None:
        self._string = string
        self._fallbacks = _fallbacks(string)
        self.matched = 0

    def step(self, character: str) -> int:
        """Read one more character: the length of the string where it ends here, else 0."""
        string, matched = self._string, self.matched
        while matched and string[matched] != character:
            matched = self._fallbacks[matched]
        if string[matched] == character:
            matched += 1
        self.matched = matched
        return matched if matched == len(string) else 0


def _fallbacks(string: str) -> list[int]:
    """For each n up to the length: the longest beginning, shorter than n, that ends string[:n]."""
    fallbacks = [0, 0]
    for character in string[1:]:
        matched = fallbacks[-1]
        while matched and string[matched] != character:
            matched = fallbacks[matched]
        fallbacks.append(matched + (string[matched] == character))
    return fallbacks
