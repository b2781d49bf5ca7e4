"""Incremental detokenization: the text of tokens that arrive one at a time.

`tokenizers.decoders.DecodeStream` does not suffice. It fails permanently on byte tokens that form
no character, and returns no text as long as such tokens arrive. If the prompt ends inside a
character, it also returns a part of the prompt.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel

# Number of last prompt tokens that are decoded before the answer. They must cover a character that
# the prompt leaves incomplete. The first space of the answer depends on the last word before the
# special tokens of a chat turn, so they must cover this word too.
PROMPT_CONTEXT_TOKENS = 16
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Detokenizer:
    """Decoder of the tokens of one answer to whole characters.

    The concatenated text equals the tokenizer's decoding of all tokens without special tokens,
    except for an incomplete last character. Invalid bytes become U+FFFD as soon as no further token
    can complete them. (Decoding all byte tokens at once would also replace valid characters next to
    invalid bytes.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """Start after `prompt`, which decides whether the answer starts with a space.

        The tokenizer is shared and never modified.
        """
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        # Detect the kind of decoder by examples, because decoders can be nested.
        self._spells_bytes = _decodes(decoder, ["Ġ", "Ã", "©"], " é")
        self._has_byte_tokens = _decodes(decoder, ["a", "<0xC3>", "<0xA9>"], "aé")
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._last_token: int | None = None  # last token that is not special
        for token in prompt[-PROMPT_CONTEXT_TOKENS:]:
            self.push(token)

    def push(self, token: int) -> str:
        """Return the text that a token adds; "" for special and unknown tokens.

        The text is also "" while a character is incomplete. A later token then adds it.
        """
        # Special and unknown tokens have no text. Decode the token twice in a row, because some
        # tokenizers drop the first space of a text.
        if not self._tokenizer.decode([token, token], skip_special_tokens=True):
            return ""
        spelled = self.spell(token)
        if spelled is None:
            added = self.flush() + self._text(token)
        else:
            added = self._characters.decode(spelled)
        self._last_token = token
        return added

    @property
    def is_within_character(self) -> bool:
        """Whether the last tokens are the start of a character."""
        incomplete, _ = self._characters.getstate()
        return bool(incomplete)

    def flush(self) -> str:
        """End an incomplete character. Return U+FFFD for it; "" if there is none."""
        return self._characters.decode(b"", final=True)

    def spell(self, token: int) -> bytes | None:
        """Return the bytes that a byte-level token or byte token spells; None for other tokens."""
        spelling: str = self._tokenizer.id_to_token(token) or ""
        if self._spells_bytes:
            try:
                return bytes([_BYTE_OF[character] for character in spelling])
            except KeyError:  # an added token is stored as plain text
                return spelling.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(spelling)):
            return bytes.fromhex(match[1])
        return None

    def _text(self, token: int) -> str:
        if self._last_token is None:
            text: str = self._tokenizer.decode([token])
            return text
        return _added_text(self._tokenizer, self._last_token, token)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text that a token adds within a text, such as " a"; special tokens by name."""
    return _added_text(tokenizer, token, token)


def _added_text(tokenizer: Tokenizer, last_token: int, token: int) -> str:
    start: str = tokenizer.decode([last_token], skip_special_tokens=False)
    both: str = tokenizer.decode([last_token, token], skip_special_tokens=False)
    if both.startswith(start):
        return both[len(start) :]
    alone: str = tokenizer.decode([token], skip_special_tokens=False)
    return alone


def _decodes(decoder: decoders.Decoder | None, pieces: list[str], text: str) -> bool:
    return decoder is not None and decoder.decode(pieces) == text


def _byte_alphabet() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte.

    A printable byte is spelled as its own character. The other bytes are spelled as the characters
    from 256 on, in order.
    """
    alphabet = sorted(ByteLevel.alphabet())
    own = [ord(character) for character in alphabet if ord(character) < 256]
    others = [byte for byte in range(256) if byte not in own]
    return dict(zip(alphabet, own + others, strict=True))


_BYTE_OF = _byte_alphabet()
