"""Artifact of a tiny encoder-decoder model, written from a random checkpoint of transformers.

The model is a BART. Its tokenizer has whole words and adds an end token, as those of T5 and Marian
do. Its outputs are noise, but depend on every word of the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from build_artifacts.decoders.graphs.export import ExportedModel, export_model
from deployments.artifacts.generation_config import (
    EncoderDecoderConfig,
    GenerationConfig,
    GenerationDefaults,
)
from deployments.artifacts.manifest import (
    TOKENIZER_NAME,
    ArtifactManifest,
    Candidate,
    ModelSource,
    Parity,
)
from deployments.artifacts.store import model_directory, set_latest
from deployments.artifacts.types import Device, TaskName
from tests.support.artifacts import NO_FILES_YET, seal
from tests.support.tiny_checkpoints import saved

SUMMARIZER, TRANSLATOR, WRITER = "tiny/summarizer", "tiny/translator", "tiny/writer"
MULTILINGUAL = "tiny/multilingual"
UNKNOWN, PAD, START, END = "<unk>", "<pad>", "<s>", "</s>"
SPECIAL = (UNKNOWN, PAD, START, END)
VOCABULARY = (
    "the a river bridge town rain road house tree bird snow wind light door stone field "
    "rose fell was is old new red green long short open closed over under near far and or not , . "
    "put this briefly : quick slow one two three four five six seven eight nine ten n't ' s"
)
LANGUAGES = ("en_XX", "fr_XX", "de_DE")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SOURCE_TOKENS, ANSWER_TOKENS = 24, 40
ENDS_SOON = 2.4  # bias of the end token's logit, so that texts end after a few words


@dataclass(frozen=True)
class TinyEncoderDecoder:
    """A tiny checkpoint, its transformers model, and the graphs that all of its artifacts share."""

    root: Path
    model: Any
    tokenizer: Tokenizer
    written: ExportedModel

    @classmethod
    def make(cls, root: Path, languages: Sequence[str] = ()) -> TinyEncoderDecoder:
        """Write checkpoint and graphs. The tokenizer prepends the first of `languages` to texts."""
        tokenizer = word_tokenizer(languages)
        model = saved(lambda: _bart(tokenizer), root / "checkpoint")
        model.final_logits_bias[0, SPECIAL.index(END)] = ENDS_SOON
        model.save_pretrained(root / "checkpoint")
        (root / "graphs").mkdir()
        return cls(root, model, tokenizer, export_model(root / "checkpoint", root / "graphs"))

    @property
    def languages(self) -> dict[str, int]:
        """Token ids by language code."""
        ids = {code: self.tokenizer.token_to_id(code) for code in LANGUAGES}
        return {code: token for code, token in ids.items() if token is not None}

    def translate(self, prompt: str, source: str, target: str, **options: Any) -> str:
        """Return the output of transformers' `generate` for a prompt in the language `source`."""
        _, *words, end = self.tokenizer.encode(prompt).ids
        ids = [self.languages[source], *words[: SOURCE_TOKENS - 2], end]
        return self._generate(ids, forced_bos_token_id=self.languages[target], **options)

    def answer(self, prompt: str, **options: Any) -> str:
        """Return the output of transformers' `generate`, by default at most ten new tokens."""
        return self._generate(self.tokenizer.encode(prompt).ids[:SOURCE_TOKENS], **options)

    def _generate(self, prompt_ids: list[int], **options: Any) -> str:
        ids = torch.tensor([prompt_ids])
        if "max_length" not in options:
            options.setdefault("max_new_tokens", 10)
        with torch.inference_mode():
            (output,) = self.model.generate(ids, **options).tolist()
        text: str = self.tokenizer.decode(output)
        return text

    def seal(
        self,
        store: Path,
        model_id: str,
        tasks: tuple[TaskName, ...],
        *,
        defaults: GenerationDefaults | None = None,
        task_prefixes: Mapping[TaskName, str] | None = None,
    ) -> None:
        """Write an artifact of the model with the id `model_id`."""
        version = hashlib.sha256(model_id.encode()).hexdigest()[:12]
        directory = model_directory(store, model_id) / version
        names = _copy(self.root / "graphs", directory / "graphs" / "tiny")
        self.tokenizer.save(str(directory / TOKENIZER_NAME))
        manifest = ArtifactManifest(
            id=model_id,
            version=version,
            tasks=tasks,
            architecture="BartForConditionalGeneration",
            max_tokens=ANSWER_TOKENS,
            output_width=self.written.vocabulary,
            generation_config=self._build_config(defaults, task_prefixes),
            source=ModelSource(ref="seeded", revision="0123abc"),
            candidates=(self._describe_graphs(),),
            files=dict.fromkeys([TOKENIZER_NAME, *names], NO_FILES_YET),
            built_with={"onnx": onnx.__version__},
        )
        seal(directory, manifest)
        set_latest(store, model_id, version)

    def _build_config(
        self, defaults: GenerationDefaults | None, task_prefixes: Mapping[TaskName, str] | None
    ) -> GenerationConfig:
        return GenerationConfig(
            layers=self.written.layers,
            kv_heads=self.written.kv_heads,
            head_dim=self.written.head_dim,
            eos_token_ids=self.written.eos_token_ids,
            encoder_decoder=EncoderDecoderConfig(
                max_source_tokens=SOURCE_TOKENS,
                decoder_start_token_id=self.model.generation_config.decoder_start_token_id,
                languages=self.languages,
            ),
            defaults=defaults or GenerationDefaults(max_new_tokens=10),
            task_prefixes=dict(task_prefixes or {}),
        )

    def _describe_graphs(self) -> Candidate:
        assert self.written.encoder is not None
        return Candidate(
            name="tiny-cpu",
            device=Device.CPU,
            precision="fp32",
            graph=f"graphs/tiny/{self.written.decoder.name}",
            encoder=f"graphs/tiny/{self.written.encoder.name}",
            parity=Parity(cosine_mean=1.0, cosine_worst=1.0, batched_cosine_worst=1.0),
        )


def word_tokenizer(languages: Sequence[str] = ()) -> Tokenizer:
    """Build a tokenizer of words and letters. It adds `languages[:1]` and END around texts."""
    pieces = [(word, 0.0) for word in SPECIAL]
    pieces += [(f"▁{word}", -2.0) for word in VOCABULARY.split()]
    pieces += [(piece, -9.0) for piece in ("▁", *LETTERS)]
    pieces += [(code, 0.0) for code in languages]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([*SPECIAL, *languages])
    added = [*languages[:1], END]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*languages[:1], "$A", END]),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in added],
    )
    return tokenizer


def _bart(tokenizer: Tokenizer) -> Any:
    config = transformers.BartConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=ANSWER_TOKENS + 8,
        pad_token_id=SPECIAL.index(PAD),
        bos_token_id=None,
        decoder_start_token_id=SPECIAL.index(START),
        eos_token_id=SPECIAL.index(END),
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config)


def _copy(graphs: Path, into: Path) -> list[str]:
    """Copy the graphs and their weights. Return their names in the artifact."""
    into.mkdir(parents=True)
    for path in sorted(graphs.iterdir()):
        (into / path.name).write_bytes(path.read_bytes())
    return [f"graphs/tiny/{path.name}" for path in sorted(graphs.iterdir())]
