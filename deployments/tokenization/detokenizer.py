"""Text out of tokens that come one at a time.

Why not `tokenizers.decoders.DecodeStream`: it raises for good where byte tokens spell no character,
holds everything back while they go on, reading all of it again for each, and tells part of the
prompt when that ended inside a character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel

# Of the prompt: enough for a begun character, and for a word behind the marks of a chat's turn.
PROMPT_CONTEXT_TOKENS = 16
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Detokenizer:
    """The text of one answer, only ever whole characters.

    Altogether it is what the tokenizer makes of all tokens without the special ones, less a
    character that the last tokens leave unfinished. Bytes that are no character become U+FFFD as
    soon as that is certain. (A tokenizer with tokens for single bytes would, when asked about all
    tokens at once, also take back good characters beside them.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt` is what the answer follows: it decides whether a first word begins with a space.

        The tokenizer is shared, and only read.
        """
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        # Asked for by example, because decoders come nested in each other.
        self._spells_bytes = _decodes(decoder, ["Ġ", "Ã", "©"], " é")
        self._has_byte_tokens = _decodes(decoder, ["a", "<0xC3>", "<0xA9>"], "aé")
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._before: int | None = None  # the last token that is text
        for token in prompt[-PROMPT_CONTEXT_TOKENS:]:
            self.push(token)

    def push(self, token: int) -> str:
        """The text that one more token adds; "" for special tokens and unknown ones."""
        # Twice, because the first space of a text is dropped by tokenizers that mark words with it.
        if not self._tokenizer.decode([token, token], skip_special_tokens=True):
            return ""
        spelled = self._bytes(token)
        if spelled is None:
            added = self._characters.decode(b"", final=True) + self._text(token)
        else:
            added = self._characters.decode(spelled)
        self._before = token
        return added

    def _bytes(self, token: int) -> bytes | None:
        """The bytes a token stands for, None where it stands for characters."""
        spelling: str = self._tokenizer.id_to_token(token) or ""
        if self._spells_bytes:
            try:
                return bytes([_BYTE_OF[character] for character in spelling])
            except KeyError:  # an added token, which is spelled as it is
                return spelling.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(spelling)):
            return bytes.fromhex(match[1])
        return None

    def _text(self, token: int) -> str:
        if self._before is None:
            text: str = self._tokenizer.decode([token])
            return text
        return _added(self._tokenizer, self._before, token)


def single(tokenizer: Tokenizer, token: int) -> str:
    """A token's own text, inside a text: with the space it begins with; special ones by name."""
    return _added(tokenizer, token, token)


def _added(tokenizer: Tokenizer, before: int, token: int) -> str:
    start: str = tokenizer.decode([before], skip_special_tokens=False)
    both: str = tokenizer.decode([before, token], skip_special_tokens=False)
    if both.startswith(start):
        return both[len(start) :]
    alone: str = tokenizer.decode([token], skip_special_tokens=False)
    return alone


def _decodes(decoder: decoders.Decoder | None, pieces: list[str], text: str) -> bool:
    return decoder is not None and decoder.decode(pieces) == text


def _byte_alphabet() -> dict[str, int]:
    """The byte for each character of byte-level vocabularies.

    Printable bytes stand for themselves; the others got the characters from 256 on, in order.
    """
    alphabet = sorted(ByteLevel.alphabet())
    own = [ord(character) for character in alphabet if ord(character) < 256]
    others = [byte for byte in range(256) if byte not in own]
    return dict(zip(alphabet, own + others, strict=True))


_BYTE_OF = _byte_alphabet()
