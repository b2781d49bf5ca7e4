"""Small tokenizers of decoders."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
START = "<|start|>"
MERGES = 60
SENTENCES = (
    '{"name": "Ada", "age": 36, "tags": ["first", "second"], "likes": null}',
    "the name of the river is the name of the city, and the city is on the river",
    "12 34 56 78 90 2024-01-31 true false null",
)


def byte_level() -> Tokenizer:
    """Build a byte-level BPE with all bytes, a few merges, START and END."""
    return Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 2 + MERGES,
        initial_alphabet=sorted(alphabet),
        special_tokens=[START, END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    written: str = tokenizer.to_str()
    return written


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """Return the token of a byte in a byte-level tokenizer or a tokenizer with byte fallback."""
    own: int | None = tokenizer.token_to_id(f"<0x{byte:02X}>")
    return tokenizer.token_to_id(_letters()[byte]) if own is None else own


@cache
def _letters() -> str:
    """Return the letters that byte-level vocabularies use for bytes, in the order of the bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(letter): letter for letter in letters if ord(letter) < 256}
    others = iter(letters[len(printable) :])
    return "".join(printable.get(byte) or next(others) for byte in range(256))
