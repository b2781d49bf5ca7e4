"""LoRA adapters made from nothing."""

from __future__ import annotations

from pathlib import Path

from tests.builders import write_json


def tiny_adapter(directory: Path, base: Path, *, labels: tuple[str, ...]) -> Path:
    """A random LoRA adapter with a classification head for the checkpoint `base`."""
    import torch
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=len(labels))
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=["query", "dense"])
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.normal_(std=0.2 if "lora_" in name else 1.0)
    adapted.save_pretrained(directory)
    write_json(directory / "labels.json", list(labels))
    return directory
