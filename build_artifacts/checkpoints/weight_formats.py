"""Detection of weight formats that the build does not read, by file name."""

from __future__ import annotations

from collections.abc import Iterable

from build_artifacts.errors import BuildError, UnsafeSource, UnsupportedModel

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
GGUF_SUFFIX = ".gguf"
ONNX_SUFFIX = ".onnx"
# Stems of pickled files that trainers write next to the weights. These files hold no weights.
_TRAINING_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")


def unread_weights_error(where: str, names: Iterable[str]) -> BuildError | None:
    """Return the error for a directory with pickled or GGUF weights only, else None."""
    files = sorted({name.rpartition("/")[2] for name in names})
    if any(name.endswith(".safetensors") for name in files):
        return None
    if pickled := _find_first(files, PICKLE_SUFFIXES):
        return UnsafeSource(
            f"{where} has pickled weights only (`{pickled}`); a pickle can execute any program, so "
            "the build never loads one",
            hint="convert them to safetensors in an isolated environment: "
            "`AutoModel.from_pretrained(DIR).save_pretrained(OUT)`, or "
            "`SentenceTransformer(DIR).save_pretrained(OUT)`",
        )
    if gguf := _find_first(files, (GGUF_SUFFIX,)):
        return UnsupportedModel(
            f"{where} has GGUF weights only (`{gguf}`); encoders require unquantized weights",
            hint="build from the original safetensors checkpoint; for a generative model, name the "
            f"file: `.../{gguf}`",
        )
    return None


def _find_first(names: list[str], suffixes: tuple[str, ...]) -> str | None:
    weights = (name for name in names if not name.startswith(_TRAINING_STATE))
    return next((name for name in weights if name.lower().endswith(suffixes)), None)
