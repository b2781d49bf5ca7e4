"""Training of the model `number-words`: a T5 of 0.7 million parameters, and its tokenizer.

python -m build_artifacts.training.number_words_model DIRECTORY
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from build_artifacts.training.number_words import ExpressionWords, generate_pairs

_BATCH = 128
_WARMUP_STEPS = 100
_VOCABULARY_SAMPLES = 50_000
_HELD_OUT = 2_000
_PAD, _END = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Hyperparameters of one training run.

    `learning_rate` is the peak. `seed` selects the training expressions.
    """

    steps: int
    learning_rate: float
    seed: int
    threads: int


TrainingBatch = tuple[Any, Any, Any]  # token ids and mask of the sources, labels; torch tensors


def create_tokenizer() -> Any:
    """Create a tokenizers.Tokenizer: one token per digit, sign and word of the task."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    # The token of a word starts with `▁`, the mark of a space. Each digit and sign is one token.
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            pre_tokenizers.Split(Regex("[0-9]|[-,.:$]|▁?[a-z]+"), "isolated"),
        ]
    )
    pairs = islice(generate_pairs(random.Random(0), held_out=False), _VOCABULARY_SAMPLES)
    words = {piece for pair in pairs for text in pair for piece, _ in pieces.pre_tokenize_str(text)}
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "</s>", "<unk>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", _END)])
    return tokenizer


def create_model(vocabulary_size: int) -> Any:
    """Create the untrained transformers.T5ForConditionalGeneration."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocabulary_size,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        tie_word_embeddings=True,
        pad_token_id=_PAD,
        eos_token_id=_END,
        decoder_start_token_id=_PAD,
    )
    return T5ForConditionalGeneration(config)


def load_model(directory: Path, tokenizer: Any) -> Any:
    """Load a checkpoint of this recipe in fp32; its vocabulary must be that of the tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from transformers import T5ForConditionalGeneration

    stored = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    assert stored == tokenizer.get_vocab(), "bug: the task has other tokens than the checkpoint"
    return T5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)


def train(model: Any, tokenizer: Any, settings: TrainingSettings) -> None:
    """Train `model` in place. Print a line of progress per hundred steps."""
    import torch

    steps = settings.steps
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    started = time.monotonic()
    for step, (ids, mask, labels) in enumerate(
        islice(_batches(tokenizer, settings.seed), steps), start=1
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s")


def _rate(step: int, steps: int) -> float:
    """Return the learning rate as a share of the peak: a linear warm-up, then a linear decay."""
    return min((step + 1) / _WARMUP_STEPS, (steps - step) / max(1, steps - _WARMUP_STEPS))


def _batches(tokenizer: Any, seed: int) -> Iterator[TrainingBatch]:
    pairs = generate_pairs(random.Random(seed), held_out=False)
    while True:
        # Pairs of similar length share a batch, which halves the padding.
        pool = sorted(islice(pairs, 8 * _BATCH), key=lambda pair: len(pair[1]))
        starts = list(range(0, len(pool), _BATCH))
        random.Random(len(pool[0][1])).shuffle(starts)
        for start in starts:
            yield _encode(tokenizer, pool[start : start + _BATCH])


def _encode(tokenizer: Any, pairs: Sequence[ExpressionWords]) -> TrainingBatch:
    import torch

    sources = _pad([tokenizer.encode(source).ids for source, _ in pairs], _PAD)
    targets = _pad([tokenizer.encode(target).ids for _, target in pairs], -100)
    ids = torch.tensor(sources)
    return ids, (ids != _PAD).long(), torch.tensor(targets)


def _pad(rows: list[list[int]], value: int) -> list[list[int]]:
    longest = max(map(len, rows))
    return [row + [value] * (longest - len(row)) for row in rows]


def measure_exact_match(model: Any, tokenizer: Any, *, beams: int = 1) -> float:
    """Return the share of held-out expressions that the model spells exactly."""
    import torch

    pairs = list(islice(generate_pairs(random.Random(2), held_out=True), _HELD_OUT))
    right = 0
    for start in range(0, len(pairs), 100):
        part = pairs[start : start + 100]
        ids, mask, _ = _encode(tokenizer, part)
        with torch.inference_mode():
            answers = model.generate(input_ids=ids, attention_mask=mask, num_beams=beams)
        texts = tokenizer.decode_batch(answers.tolist())
        right += sum(text == words for text, (_, words) in zip(texts, part, strict=True))
    return right / len(pairs)


def save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write a checkpoint in fp16. Convert `model` itself to fp16 too."""
    import torch
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    model.generation_config = GenerationConfig(
        decoder_start_token_id=_PAD, eos_token_id=_END, pad_token_id=_PAD, max_length=64
    )
    model.to(torch.float16).save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        model_max_length=128,
    ).save_pretrained(directory)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write the checkpoint")
    parser.add_argument("--start", type=Path, help="checkpoint to continue from")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak")
    parser.add_argument("--seed", type=int, default=1, help="of the expressions")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    tokenizer = create_tokenizer()
    if arguments.start is None:
        model = create_model(tokenizer.get_vocab_size())
    else:
        model = load_model(arguments.start, tokenizer)
    settings = TrainingSettings(
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        threads=arguments.threads,
    )
    train(model, tokenizer, settings)
    model.eval()
    save(model, tokenizer, arguments.directory)
    model.float()
    for beams in (1, 4):
        print(f"exact match, {beams} beams: {measure_exact_match(model, tokenizer, beams=beams)}")


if __name__ == "__main__":
    main()
