"""Seeded texts of various lengths, in scripts that are hard for tokenizers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from tests.support.tiny_encoders import WORDS

_PLAIN = (*WORDS, "unfamiliar", "words", "spelt", "2026", "3.14", "don't", "e-mail")
_UPPER = ("GREAT", "Film", "NASA", "iPhone", "CITY")
_ACCENTS = ("Zürich", "naïve", "crème brûlée", "Łódź", "ÀÉÎÕÜ", "cafe\u0301", "ﬁlm", "straße")
_EMOJI = ("🚲", "👩‍🚀", "👍🏽", "🇵🇱", "❤️", "good🙂film")
_SCRIPTS = ("東京", "漢字かな", "한국어", "שלום", "مدينة", "Москва", "日本のfilm")
_PUNCTUATION = ("...", "?!", "—", "«so»", "(a)", "#1", "50%", "a/b", "$9.99", "“quoted”", "x=y;")
_KINDS = (_PLAIN, _PLAIN, _PLAIN, _UPPER, _ACCENTS, _EMOJI, _SCRIPTS, _PUNCTUATION)
_GAPS = (" ", " ", " ", " ", "  ", "\n", "\t", "\u00a0")


def varied_texts(
    tokenizer: Path, count: int, *, max_tokens: int, seed: int = 0, min_tokens: int = 1
) -> list[str]:
    """Return `count` different texts of `min_tokens` to `max_tokens` tokens.

    `tokenizer` is the directory of a tokenizer.json. The first text has the minimum length, the
    second text the maximum length. Special tokens do not count.
    """
    counter = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    lengths = [min_tokens, max_tokens]
    while len(texts) < count:
        due = lengths[len(texts)] if len(texts) < 2 else rng.randint(min_tokens, max_tokens)
        texts.setdefault(_text(counter, rng, due))
    return list(texts)


def _text(counter: Tokenizer, rng: random.Random, tokens: int) -> str:
    """Build a text of exactly `tokens` tokens. Add pieces, and single letters at the end."""
    text = ""
    while (left := tokens - _count(counter, text)) > 0:
        piece = rng.choice(rng.choice(_KINDS))
        if _count(counter, piece) > left:
            piece = rng.choice("aeiouxyz?!.,🚲東")
        text += (rng.choice(_GAPS) if text else "") + piece
    return text


def _count(counter: Tokenizer, text: str) -> int:
    return len(counter.encode(text, add_special_tokens=False).ids)


def with_masks(text: str, count: int, *, seed: int) -> str:
    """Insert `count` masks at seeded random positions between the words of `text`."""
    rng = random.Random(seed)
    words: list[str] = text.split(" ")
    for _ in range(count):
        words.insert(rng.randint(0, len(words)), "[MASK]")
    return " ".join(words)


def pair_texts(texts: Sequence[str]) -> list[dict[str, str]]:
    """Pair the first text with the second, the third with the fourth, and so on."""
    return [
        {"text": first, "text_pair": second}
        for first, second in zip(texts[::2], texts[1::2], strict=False)
    ]
