"""Random LoRA adapters."""

from __future__ import annotations

from pathlib import Path

from build_artifacts.checkpoints.models import LOADERS
from deployments.artifacts.types import ModelHead
from tests.support.tiny_encoders import write_json

# Head -> (peft's task type, name of the fully trained layer).
_KINDS = {
    ModelHead.LABELS: ("SEQ_CLS", "classifier"),
    ModelHead.TOKENS: ("TOKEN_CLS", "classifier"),
    ModelHead.SPAN: ("QUESTION_ANS", "qa_outputs"),
}


def tiny_adapter(
    directory: Path,
    base: Path,
    *,
    head: ModelHead = ModelHead.LABELS,
    labels: tuple[str, ...] = (),
    typed: bool = True,
) -> Path:
    """Write a random LoRA adapter with a head for the checkpoint `base`.

    If `typed` is False, peft stores the class of the base model instead of a task type.
    """
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    named = {"num_labels": len(labels)} if labels else {}
    model = getattr(transformers, LOADERS[head]).from_pretrained(base, **named)
    task_type, trained = _KINDS[head]
    config = LoraConfig(
        task_type=task_type if typed else None,
        modules_to_save=None if typed else [trained],
        r=4,
        target_modules=["query", "dense"],
    )
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(std=0.2 if "lora_" in name else 1.0)
    adapted.save_pretrained(directory)
    if labels:
        write_json(directory / "labels.json", list(labels))
    return directory
