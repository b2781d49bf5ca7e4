"""Conversion of GGUF weights to a transformers checkpoint in fp32."""

from __future__ import annotations

from pathlib import Path

from build_artifacts.checkpoints.checkpoint import Checkpoint, copy_without_weights
from build_artifacts.checkpoints.file_formats import ORIGINAL_HINT
from build_artifacts.errors import UnsupportedModel, convert_library_error


def dequantize_gguf(checkpoint: Checkpoint, into: Path) -> None:
    """Write the checkpoint to `into`, with its weights as safetensors.

    Raises UnsupportedModel if the weights cannot be read or some are missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    file = checkpoint.packed
    assert file is not None, "bug: dequantize_gguf without a GGUF file"
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as exc:  # the GGUF reader may raise any exception
        message = f"the weights in `{file.name}` cannot be read"
        raise convert_library_error(exc, message, hint=ORIGINAL_HINT) from exc
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(
            f"`{file.name}` has no weights for `{missing[0]}`", hint="download the file again"
        )
    config = loaded.config
    config.__dict__.pop("quantization_config", None)
    # Copy the weights to a new model: transformers treats a model loaded from GGUF as quantized
    # and does not save it.
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig()
    model.save_pretrained(into)
    copy_without_weights(checkpoint.directory, into, weights=checkpoint.weights)
