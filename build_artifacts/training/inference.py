r"""Training of `minilm-nli-lora` on pairs of premise and hypothesis, and its zero-shot accuracy.

    python -m build_artifacts.training.inference \
        MINILM TRAIN_TSV OPINIONS_TSV TEST_TSV SENTIMENT_TSV DIRECTORY

Lines of TRAIN_TSV and TEST_TSV are `label<TAB>premise<TAB>hypothesis`. Lines of OPINIONS_TSV are
`rating<TAB>sentence`, with ratings from -4 to 4. The sentences become premises with hypotheses
about the opinion. SENTIMENT_TSV has a header and the lines `label<TAB>sentence`, as in
`build_artifacts/data/sst2-dev.tsv`. The training uses neither the sentences of SENTIMENT_TSV nor
the hypotheses that measure the zero-shot accuracy.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from build_artifacts.training.embeddings import embed
from build_artifacts.training.lora import LoraSettings, PairClassifier
from build_artifacts.types import TorchTensor
from deployments.messages import TextPair

LABELS = ("contradiction", "neutral", "entailment")
_BATCH = 32
_ENTAILMENT = LABELS.index("entailment")
# Hypotheses by sentiment id. The embedding baseline compares sentences with the same texts.
_SENTIMENTS = ("This movie is bad.", "This movie is good.")

# Training hypotheses. A good opinion entails the first of a pair, a bad opinion the second.
_OPINIONS = (
    ("This is good.", "This is bad."),
    ("It is great.", "It is terrible."),
    ("The author likes it.", "The author dislikes it."),
    ("This text is positive.", "This text is negative."),
    ("This example is positive.", "This example is negative."),
    ("The author is happy.", "The author is unhappy."),
)
_CLEAR, _NONE = 1.0, 0.3  # minimum |rating| of an opinion, maximum |rating| of a neutral sentence

Example = tuple[str, str, int]  # premise, hypothesis and label id


def read_examples(path: Path) -> list[Example]:
    lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [(premise, claim, LABELS.index(label)) for label, premise, claim in lines]


def read_opinions(path: Path) -> list[Example]:
    """Return two examples per clear or neutral sentence: both hypotheses of a random pair."""
    rng = random.Random(0)
    examples: list[Example] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        rating, sentence = line.split("\t", 1)
        hypotheses = rng.choice(_OPINIONS)
        if abs(float(rating)) >= _CLEAR:
            right = 0 if float(rating) > 0 else 1
            examples.append((sentence, hypotheses[right], _ENTAILMENT))
            examples.append((sentence, hypotheses[1 - right], LABELS.index("contradiction")))
        elif abs(float(rating)) <= _NONE:
            examples.extend((sentence, each, LABELS.index("neutral")) for each in hypotheses)
    return examples


def sample_batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Yield shuffled batches without end; examples of a batch have similar lengths."""
    rng = random.Random(0)
    while True:
        pool = list(examples)
        rng.shuffle(pool)
        size = 16 * _BATCH
        for start in range(0, len(pool), size):
            part = sorted(pool[start : start + size], key=lambda each: len(each[0]) + len(each[1]))
            batches = [part[i : i + _BATCH] for i in range(0, len(part), _BATCH)]
            rng.shuffle(batches)
            yield from batches


def train(base: Path, examples: Sequence[Example], steps: int) -> PairClassifier:
    """Return a classifier over `base` with a new LoRA adapter, trained for `steps` batches."""
    import torch

    settings = LoraSettings(labels=LABELS, max_tokens=96, steps=steps, threads=2)
    classifier = PairClassifier(base, settings)

    def loss(batch: list[Example]) -> TorchTensor:
        logits = classifier.logits([(premise, claim) for premise, claim, _ in batch])
        expected = torch.tensor([label for _, _, label in batch])
        return torch.nn.functional.cross_entropy(logits, expected)

    classifier.fit(sample_batches(examples), loss)
    return classifier


def measure_inference(classifier: PairClassifier, examples: Sequence[Example]) -> float:
    """Return the share of `examples` for which the most likely of three labels is right."""
    logits = classifier.predict([(premise, claim) for premise, claim, _ in examples])
    best = logits.argmax(dim=1).tolist()
    return _share(best, [label for _, _, label in examples])


def measure_choice(
    classifier: PairClassifier, base: Path, examples: Sequence[Example]
) -> dict[str, float]:
    """Return the accuracy of finding the entailed claim, by entailment and by embedding.

    Use only premises that have several claims, of which exactly one is entailed.
    """
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(example[0], []).append(example)
    decided = [
        group
        for group in groups.values()
        if len(group) > 1 and [label for _, _, label in group].count(_ENTAILMENT) == 1
    ]
    flat = [example for group in decided for example in group]
    follows = classifier.predict([(premise, claim) for premise, claim, _ in flat]).softmax(dim=1)
    premises = embed(base, [premise for premise, _, _ in flat])
    near = (premises * embed(base, [claim for _, claim, _ in flat])).sum(axis=1)
    hits = {"zero-shot": 0, "embeddings": 0}
    start = 0
    for group in decided:
        right = [label for _, _, label in group].index(_ENTAILMENT)
        part = slice(start, start + len(group))
        hits["zero-shot"] += int(follows[part, _ENTAILMENT].argmax()) == right
        hits["embeddings"] += int(near[part].argmax()) == right
        start += len(group)
    return {name: count / len(decided) for name, count in hits.items()}


def measure_zero_shot(classifier: PairClassifier, base: Path, path: Path) -> dict[str, float]:
    """Return the accuracy of two sentiment classifiers: entailment and nearest embedding."""
    rows = path.read_text(encoding="utf-8").splitlines()[1:]
    lines = [row.split("\t", 1) for row in rows]
    expected, sentences = [int(label) for label, _ in lines], [text for _, text in lines]
    pairs: list[TextPair] = [(text, claim) for text in sentences for claim in _SENTIMENTS]
    logits = classifier.predict(pairs)[:, _ENTAILMENT].reshape(-1, len(_SENTIMENTS))
    nearest = (embed(base, sentences) @ embed(base, _SENTIMENTS).T).argmax(axis=1)
    return {
        "zero-shot": _share(logits.argmax(dim=1).tolist(), expected),
        "embeddings": _share(nearest.tolist(), expected),
    }


def _share(found: Sequence[int], expected: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("minilm", "train", "opinions", "test", "sentiment", "directory"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=1600)
    arguments = parser.parse_args()
    examples = read_examples(arguments.train) + read_opinions(arguments.opinions)
    classifier = train(arguments.minilm, examples, arguments.steps)
    classifier.save(arguments.directory)
    print(f"accuracy {measure_inference(classifier, read_examples(arguments.test)):.4f}")
    print(measure_choice(classifier, arguments.minilm, read_examples(arguments.test)))
    print(measure_zero_shot(classifier, arguments.minilm, arguments.sentiment))


if __name__ == "__main__":
    main()
