"""Texts and pairs of texts for comparing a graph with the reference model.

The texts have one word to several hundred tokens. They contain several languages and scripts, code,
numbers, emoji and opinions. Lengths alternate, so that batches contain padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.artifacts.pair_template import PairTemplate
from deployments.artifacts.types import ModelHead
from deployments.messages import Call, Text, TextPair, TokenizedItem, Truncation
from deployments.tasks import TASKS
from deployments.tasks.zero_shot import has_entailment_label
from deployments.tokenization.tokenizer import CachingTokenizer

# The reference stores one logit per mask and vocabulary entry. Probes with masks are therefore
# truncated, and MASKED_REFERENCE_BYTES limits the number of masks: at most four per probe for BERT.
# A probe has at least one mask, even if the logits then exceed the limit: 64 MB for XLM-R.
MASKED_PROBE_TOKENS = 128
MASKED_REFERENCE_BYTES = 32 << 20
WORDS_PER_MASK = 7


def tokenize_probes(directory: Path, metadata: CheckpointMetadata) -> tuple[TokenizedItem, ...]:
    """Tokenize the probes with the tokenizer.json in `directory`.

    Models for question answering, ranking and entailment get pairs; fill-mask models get masks.
    """
    paired = any(TASKS[task].reads_pairs for task in metadata.tasks)
    is_nli = metadata.head is ModelHead.LABELS and has_entailment_label(metadata.labels)
    texts = PAIRS if paired or is_nli else PROBES
    if metadata.head is not ModelHead.MASKS:
        return tokenize_texts(
            directory, metadata.max_tokens, texts, pair_template=metadata.pair_template
        )
    items = tokenize_texts(directory, min(metadata.max_tokens, MASKED_PROBE_TOKENS), texts)
    per_probe = MASKED_REFERENCE_BYTES // (4 * metadata.output_width * len(items))
    special = _special_ids(directory)
    assert metadata.mask_token is not None, "bug: a head MASKS without a mask token"
    masked = [_mask_tokens(item, metadata.mask_token, special, max(1, per_probe)) for item in items]
    # Drop texts of unknown characters: they consist of special tokens, which are not masked.
    return tuple(item for item in masked if metadata.mask_token in item.ids)


def tokenize_texts(
    directory: Path,
    max_tokens: int,
    texts: Sequence[Text],
    *,
    pair_template: PairTemplate | None = None,
) -> tuple[TokenizedItem, ...]:
    """Tokenize texts or pairs with the tokenizer.json in `directory`; truncate to `max_tokens`."""
    call = Call(
        texts=tuple(texts),
        fields=tuple(f"probes[{i}]" for i in range(len(texts))),
        options=None,
        truncation=Truncation.KEEP_START,
        deadline_s=float("inf"),
    )
    tokenizer = CachingTokenizer(directory, max_tokens, pair_template=pair_template)
    (tokenized,) = tokenizer.tokenize([call])
    if isinstance(tokenized, BaseException):
        raise tokenized
    return tuple(tokenized.items)


def _special_ids(directory: Path) -> NDArray[np.int32]:
    from tokenizers import Tokenizer

    added = Tokenizer.from_file(str(directory / TOKENIZER_NAME)).get_added_tokens_decoder()
    return np.array([i for i, token in added.items() if token.special], dtype=np.int32)


def _mask_tokens(
    item: TokenizedItem, mask_token: int, special: NDArray[np.int32], max_masks: int
) -> TokenizedItem:
    """Mask every seventh token that is not special. Reduce the masks to at most `max_masks`."""
    candidates = np.flatnonzero(~np.isin(item.ids, special))
    masked = candidates[::WORDS_PER_MASK]
    masked = masked[:: max(1, -(-len(masked) // max_masks))]
    ids = item.ids.copy()
    ids[masked] = mask_token
    return TokenizedItem(ids, item.second_segment_start)


_HARBOUR = (
    "The harbour wakes before the town does. At four the first trawlers come round the breakwater "
    "with their lamps still lit, and the gulls, who keep better time than the church, are already "
    "arguing on the roof of the ice house. Marta counts the boats from her kitchen window, as her "
    "mother did, and puts the kettle on when the last of them is in. Nobody has asked her to; it "
    "is simply what is done in that house. By six the auction hall smells of diesel and cold salt, "
    "and the buyers walk along the crates with their hands in their pockets, because whoever takes "
    "them out is thought to be in a hurry, and whoever is in a hurry pays more."
)
_BRIDGE = (
    "When the old bridge was measured again, the engineers found that its middle span had sunk by "
    "eleven millimetres in two winters. That is not much for a bridge of that age, but it was more "
    "than in the forty years before, and the curve on the chart pointed only one way. They closed "
    "one lane, hung sensors under the deck and waited for frost. In January the readings jumped on "
    "three nights in a row, always between two and four, always when the river was low. It turned "
    "out that a culvert upstream had collapsed, so that the water undercut the second pier when "
    "the mill opened its gates. The repair took nine days and cost less than the measuring had."
)
_RECIPE = (
    "Soak the beans overnight in plenty of water. Next day drain them, cover them again, "
    "add a bay leaf and half an onion, and let them simmer for about an hour and a quarter; salt "
    "only at the end, or the skins stay hard. Meanwhile cut two carrots, a stick of celery and the "
    "other half of the onion into small cubes and sweat them slowly in olive oil until they smell "
    "sweet. Stir in a spoonful of tomato paste, let it darken, then add the beans with two ladles "
    "of their water. Cook for twenty minutes more. It tastes better the day after."
)
_MEETING = (
    "Decisions of Tuesday's meeting: the release moves to the ninth because the migration of the "
    "billing tables has not been rehearsed on a full copy; support gets a read-only view of the "
    "audit log; we stop answering tickets by private mail. Open: who pays for the second region, "
    "and whether the nightly export may be dropped for customers who have not read it for a year. "
    "Jonas writes the summary for the board, Aylin books the rehearsal, everybody checks their "
    "alerts before Friday noon. Next meeting in two weeks, same room, half an hour at most."
)

PROBES: tuple[str, ...] = (
    "Hello",
    "This is the best soup I have eaten in years, and I ate it standing in the rain.",
    "What time does the last train to the airport leave on Sundays?",
    _HARBOUR,
    "no",
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2",
    "The concert was a disaster: wrong notes, a broken microphone and no apology.",
    "Die Bibliothek schließt heute schon um vier, weil die Heizung repariert wird.",
    "A child builds a tower of wooden blocks on the kitchen floor.",
    "Wonderful!",
    _RECIPE,
    "Der Kuchen war trocken, der Kaffee kalt und die Bedienung unfreundlich.",
    "Two dogs chase a yellow ball across a wet meadow.",
    "🎉🎉 we won!!! 🏆",
    "The second half drags, the jokes fall flat, and the ending insults everyone who stayed.",
    "SELECT city, COUNT(*) FROM orders WHERE paid = TRUE GROUP BY city ORDER BY 2 DESC;",
    "She laughed so hard that the neighbours knocked on the wall.",
    _BRIDGE,
    "La panadería de la esquina abre a las seis y huele a canela.",
    "Horrible service, I will never come back.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "ok",
    "How do I renew a passport that expired while I was living abroad?",
    "An elegant, warm and quietly funny film that trusts its audience.",
    "The invoice of 14 March (no. 2024-0117) over 1,284.50 EUR has not been paid yet.",
    "東京の朝は静かで、駅前の花屋だけがもう開いていた。",
    _HARBOUR + " " + _BRIDGE,
    "The battery lasts two full days and the screen is superb; easily worth the money.",
    "Il fait froid ce matin, mais le ciel est parfaitement clair.",
    "Cheap plastic, a loud fan, and it broke within a week.",
    "The square root of two cannot be written as a fraction.",
    "why",
    "Meteorologists expect heavy snow above eight hundred metres from Thursday evening onwards.",
    "Ce film est magnifique, drôle et bouleversant du début à la fin.",
    _MEETING,
    "My grandmother taught me to read the tide tables before she taught me to read books.",
    "git commit --amend --no-edit && git push --force-with-lease origin fix/timeouts",
    "Not bad at all; in fact I would happily watch it again.",
    "I expected little and got even less.",
    "Поезд опоздал на сорок минут, и мы пропустили начало спектакля.",
    '{"name": "sensor-7", "unit": "°C", "values": [21.5, 21.7, null, 22.0]}',
    "Boring",
    "The court found that the contract was void because neither side had read it.",
    "A man in a red coat plays the violin under the station clock.",
    _RECIPE + " " + _MEETING,
    "Absolutely loved the characters, the music, and every frame of that garden.",
    "Hydrogen has one proton, helium two, lithium three.",
    "O serviço foi excelente e o quarto tinha uma vista linda para o mar. 😍",
    "He repaired the clock with a paper clip, and it has been exact ever since.",
    "It is a dull, lifeless and badly acted waste of two hours.",
    "Is a tomato a fruit or a vegetable?",
    "今天的会议取消了,请把报告发到我的邮箱。",
    "Prices rose by 3.2 % in May, after 2.9 % in April and 2.4 % in March.",
    "Thank you so much, you saved my day! 🙏",
    "The museum's new wing, which opened in autumn, shows maps of places that never existed.",
    "    \t  spaces   everywhere  \n\n and  lines ",
    "A brilliant performance by the whole cast, tender and thrilling at once.",
    "Turn left after the bridge, pass the mill, and stop where the road becomes gravel.",
    _BRIDGE + " " + _RECIPE + " " + _MEETING + " " + _HARBOUR,
    "الطقس جميل اليوم والسماء صافية.",
    "The plot makes no sense and the acting is painful to watch.",
    "She speaks four languages, but she dreams only in the one she never learned to write.",
    "http://example.org/search?q=blue+whale&lang=en#results",
    "A gentle story about friendship, told with charm and humour.",
)

# Questions, each with a passage. Most passages contain the answer.
_QUESTIONS: tuple[TextPair, ...] = (
    ("Who counts the boats from her kitchen window?", _HARBOUR),
    ("How far had the middle span sunk?", _BRIDGE),
    ("When is salt added to the beans?", _RECIPE),
    ("Why does the release move to the ninth?", _MEETING),
    ("when do the first trawlers come round the breakwater", _HARBOUR),
    ("Which pier did the water undercut?", _BRIDGE),
    ("How long do the beans simmer?", _RECIPE),
    ("Who books the rehearsal?", _MEETING),
    ("What does the auction hall smell of?", _HARBOUR + " " + _BRIDGE),
    ("Wie lange dauerte die Reparatur?", _BRIDGE),
    ("What is sweated slowly in olive oil?", _RECIPE + " " + _MEETING),
    ("What does support get?", _MEETING),
    ("Who argues on the roof of the ice house?", _HARBOUR),
    ("What had collapsed upstream?", _RECIPE + " " + _BRIDGE),
    ("Where does it taste better?", _RECIPE),
    ("When is the next meeting?", _MEETING + " " + _HARBOUR),
    ("Who painted the ceiling of the chapel?", _BRIDGE),
    ("What is the capital of Mongolia?", _MEETING),
    ("¿Quién cuenta los barcos?", _HARBOUR),
    ("price of the crates?", _HARBOUR),
)
PAIRS: tuple[TextPair, ...] = _QUESTIONS + tuple(zip(PROBES[::2], PROBES[1::2], strict=True))
