"""Formats of weights by file name, and the error for a model that has only unread ones."""

from __future__ import annotations

from collections.abc import Iterable

from build_artifacts.checkpoints.checkpoint import MODULES_NAME
from build_artifacts.errors import BuildError, UnsafeSource, UnsupportedModel
from deployments.builds.sources import GGUF_SUFFIX

SAFETENSORS_SUFFIX = ".safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
ORIGINAL_HINT = "build from the original safetensors checkpoint"
# Stems of pickled files that trainers write next to the weights. These files hold no weights.
_TRAINING_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")


def unread_weights_error(
    where: str, names: Iterable[str], model_class: str = ""
) -> BuildError | None:
    """Return the error for files with pickled or GGUF weights only, else None.

    `model_class` is the first class that config.json names, which the hint for pickles states.
    """
    files = sorted({name.rpartition("/")[2] for name in names})
    if any(name.endswith(SAFETENSORS_SUFFIX) for name in files):
        return None
    if pickled := _find_first(files, PICKLE_SUFFIXES):
        return UnsafeSource(
            f"{where} has pickled weights only (`{pickled}`); a pickle can execute any program, so "
            "the build never loads one",
            hint="convert them to safetensors in an isolated environment: "
            + _suggest_conversion(pickled, files, model_class),
        )
    if gguf := _find_first(files, (GGUF_SUFFIX,)):
        return UnsupportedModel(
            f"{where} has GGUF weights only (`{gguf}`); encoders require unquantized weights",
            hint=f"{ORIGINAL_HINT}; for a generative model, name the file: `.../{gguf}`",
        )
    return None


def _suggest_conversion(pickled: str, files: list[str], model_class: str) -> str:
    """Return the program that writes `pickled` as safetensors, without loss of a head."""
    if pickled.startswith("adapter_model"):
        return "`PeftModel.from_pretrained(BASE_MODEL, DIR).save_pretrained(OUT)` of peft"
    if MODULES_NAME in files:
        return "`SentenceTransformer(DIR).save_pretrained(OUT)`"
    # `AutoModel` would drop a head. The name is from a file of the source, so take no other text.
    name = model_class if model_class.isidentifier() else "CLASS_OF_THE_MODEL"
    return (
        f"`transformers.{name}.from_pretrained(DIR).save_pretrained(OUT)`; copy the files of the "
        "tokenizer to OUT"
    )


def _find_first(names: list[str], suffixes: tuple[str, ...]) -> str | None:
    weights = (name for name in names if not name.startswith(_TRAINING_STATE))
    return next((name for name in weights if name.lower().endswith(suffixes)), None)
