"""Training of LoRA adapters with a new classifier, saved in fp16 for the merge in a build."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.adapter import ADAPTER_STEM, LABELS_NAME
from build_artifacts.types import TorchTensor
from deployments.messages import TextPair

# Base model to state in the adapter config. By default, peft states the local path of the base.
_BASE = "sentence-transformers/all-MiniLM-L6-v2"

_MAX_POSITIONS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Hyperparameters of one training run."""

    labels: tuple[str, ...]
    rank: int = 32
    max_tokens: int = 128
    learning_rate: float = 5e-4
    steps: int
    start: Path | None = None  # initial LoRA weights: an adapter of equal rank and modules
    threads: int = 1


class PairClassifier:
    """A checkpoint with a LoRA adapter, which scores pairs of texts."""

    def __init__(self, base: Path, settings: LoraSettings) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from tokenizers import Tokenizer
        from transformers import AutoModelForSequenceClassification

        torch.set_num_threads(settings.threads)
        torch.manual_seed(0)
        self.settings = settings
        self._tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        self._tokenizer.enable_truncation(settings.max_tokens, strategy="longest_first")
        self._tokenizer.enable_padding()
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=len(settings.labels), use_safetensors=True, local_files_only=True
        )
        config = LoraConfig(
            task_type="SEQ_CLS",
            r=settings.rank,
            lora_alpha=2 * settings.rank,
            lora_dropout=0.05,
            target_modules=["query", "key", "value", "dense"],
            modules_to_save=["classifier"],
        )
        self.model = get_peft_model(model, config)
        if settings.start is not None:
            self.load(settings.start, with_head=False)

    def load(self, directory: Path, *, with_head: bool = True) -> None:
        """Copy the weights of an adapter of equal rank and modules.

        Without `with_head`, copy its LoRA weights but not its classifier.
        """
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors.torch import load_file

        stored = load_file(directory / f"{ADAPTER_STEM}.safetensors")
        used = {k: v.float() for k, v in stored.items() if with_head or ".lora_" in k}
        set_peft_model_state_dict(self.model, get_peft_model_state_dict(self.model) | used)

    def logits(self, pairs: Sequence[TextPair]) -> TorchTensor:
        """Compute the logits [pairs, labels], in one batch."""
        import torch

        encodings = self._tokenizer.encode_batch(list(pairs))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = self.model(
                input_ids=torch.tensor([each.ids for each in encodings]),
                attention_mask=torch.tensor([each.attention_mask for each in encodings]),
                token_type_ids=torch.tensor([each.type_ids for each in encodings]),
            )
        return output.logits.float()

    def predict(self, pairs: Sequence[TextPair], *, batch: int = 64) -> TorchTensor:
        """Compute the logits [pairs, labels] in batches, without gradients.

        From this call on, `logits` and `predict` truncate pairs at _MAX_POSITIONS instead of
        `max_tokens`. Dropout is off until the next `fit`.
        """
        import torch

        self.model.eval()
        self._tokenizer.enable_truncation(_MAX_POSITIONS, strategy="longest_first")
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        scores = torch.zeros(len(pairs), len(self.settings.labels))
        with torch.inference_mode():
            for start in range(0, len(order), batch):
                part = order[start : start + batch]
                scores[part] = self.logits([pairs[i] for i in part])
        return scores

    def fit(self, batches: Iterable[Any], loss_of: Callable[[Any], TorchTensor]) -> None:
        """Minimize the loss that `loss_of` returns for a batch. Print a line per fifty steps."""
        import torch

        steps = self.settings.steps
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=self.settings.learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / (0.06 * steps), (steps - step) / steps)
        )
        self.model.train()
        started, recent = time.monotonic(), 0.0
        for step, batch in zip(range(1, steps + 1), batches, strict=False):
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            recent += loss.item() / 50
            if step % 50 == 0:
                print(f"step {step} loss {recent:.4f} {time.monotonic() - started:.0f} s")
                recent = 0.0

    def save(self, directory: Path) -> None:
        """Write the adapter with fp16 weights, and a file with its labels."""
        from safetensors.torch import load_file, save_file

        self.model.peft_config["default"].base_model_name_or_path = _BASE
        self.model.save_pretrained(directory)
        path = directory / f"{ADAPTER_STEM}.safetensors"
        save_file({name: value.half() for name, value in load_file(path).items()}, path)
        (directory / LABELS_NAME).write_text(json.dumps(list(self.settings.labels)) + "\n")
