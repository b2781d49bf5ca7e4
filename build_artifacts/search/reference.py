"""The probes of a model: what its graphs and the original are asked, and compared by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.facts import ModelFacts
from build_artifacts.search.probes import PAIRS, PROBES
from deployments.encoding.encoder import Encoder
from deployments.manifest import TOKENIZER_NAME, Head, TaskName
from deployments.messages import Call, EncodedItem, Text, Truncation
from deployments.tasks.zero_shot import judges_entailment

# A masked token is answered with a logit per word of the vocabulary, so a reference grows fast.
# Its probes are cut to this many tokens, and masks are set as long as all their logits stay within
# these bytes (BERT: four masks a probe); a probe has one at least, which is 64 MB for XLM-R.
MASKED_PROBE_TOKENS = 128
MASKED_REFERENCE_BYTES = 32 << 20
WORDS_PER_MASK = 7


def encode_probes(directory: Path, facts: ModelFacts) -> tuple[EncodedItem, ...]:
    """The probes as the model is going to see them, by the tokenizer.json in `directory`.

    Question answering, ranking and the judging of entailment get pairs; a model that fills masks
    gets some.
    """
    paired = {TaskName.QUESTION_ANSWERING, TaskName.TEXT_RANKING} & set(facts.tasks)
    judging = facts.head is Head.LABELS and judges_entailment(facts.labels)
    texts = PAIRS if paired or judging else PROBES
    if facts.head is not Head.MASKS:
        return encode_texts(directory, facts.max_tokens, texts)
    items = encode_texts(directory, min(facts.max_tokens, MASKED_PROBE_TOKENS), texts)
    per_probe = MASKED_REFERENCE_BYTES // (4 * facts.width * len(items))
    special = _special_ids(directory)
    assert facts.mask_token is not None, "facts of a head MASKS name its token; this is a bug"
    masked = [_masked(item, facts.mask_token, special, max(1, per_probe)) for item in items]
    # A text of nothing but unknown characters has no token to ask for.
    return tuple(item for item in masked if facts.mask_token in item.ids)


def encode_texts(
    directory: Path, max_tokens: int, texts: Sequence[Text]
) -> tuple[EncodedItem, ...]:
    """Each text or pair cut to `max_tokens`, by the tokenizer.json in `directory`."""
    call = Call(
        texts=tuple(texts),
        fields=tuple(f"probes[{i}]" for i in range(len(texts))),
        options=None,
        truncation=Truncation.KEEP_START,
        deadline_s=float("inf"),
    )
    (encoded,) = Encoder(directory, max_tokens).encode([call])
    if isinstance(encoded, BaseException):
        raise encoded
    return tuple(encoded.items)


def _special_ids(directory: Path) -> NDArray[np.int32]:
    from tokenizers import Tokenizer

    added = Tokenizer.from_file(str(directory / TOKENIZER_NAME)).get_added_tokens_decoder()
    return np.array([i for i, token in added.items() if token.special], dtype=np.int32)


def _masked(
    item: EncodedItem, mask_token: int, special: NDArray[np.int32], at_most: int
) -> EncodedItem:
    """`item` with every seventh real token, but no more than `at_most`, replaced by the mask."""
    real = np.flatnonzero(~np.isin(item.ids, special))
    chosen = real[::WORDS_PER_MASK]
    chosen = chosen[:: max(1, -(-len(chosen) // at_most))]
    ids = item.ids.copy()
    ids[chosen] = mask_token
    return EncodedItem(ids, item.second_from)
