"""A checkpoint becomes a decoder's graph, by the model builder of onnxruntime-genai (MIT).

The builder runs in a process of its own: it is a program rather than a library, and gives back its
memory when it ends. Families that it does not know are written by `written/`. Either way the
weights lie beside the graph, in one file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from build_artifacts.checkpoints.facts import ModelFacts
from build_artifacts.decoders.slicing import GRAPH_NAME, WEIGHTS_NAME, answer_from
from build_artifacts.decoders.written.quantising import Bits, quantised
from build_artifacts.decoders.written.writing import ENCODER_NAME, is_written, write_decoder
from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipe import DecoderRecipe
from deployments.manifest import Device

# Bits of the weights of written graphs, by precision; None: as they are.
_WRITTEN: Mapping[str, Bits | None] = {"fp32": None, "int8": 8, "int4": 4}
_Numbers = tuple[int, int, int, int]  # layers, heads of keys and values, head size, words
_PROVIDERS = {Device.CPU: "cpu", Device.GPU: "cuda"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
# Every layer keeps all keys and values, so that all rows of memory are of one shape.
_ALWAYS = ("hf_token=false", "windowed_kv_cache=false")


def export_decoder(weights: Path, facts: ModelFacts, recipe: DecoderRecipe, into: Path) -> Path:
    """The graph of the checkpoint in `weights`, alone with its weights in `into`.

    Raises UnsupportedModel.
    """
    if is_written(weights):
        _write(weights, facts, recipe, into)
        return into / GRAPH_NAME
    with TemporaryDirectory(dir=into) as beside:
        made = Path(beside, "made")
        _run_builder(weights, recipe, made, Path(beside, "cache"))
        _check(facts, _told(made))
        for name in (GRAPH_NAME, WEIGHTS_NAME):
            (made / name).rename(into / name)
    answer_from(into / GRAPH_NAME, facts.architecture)
    return into / GRAPH_NAME


def _write(weights: Path, facts: ModelFacts, recipe: DecoderRecipe, into: Path) -> None:
    if recipe.precision not in _WRITTEN:
        raise UnsupportedModel(
            f"there is no {recipe.precision} graph of this family ({recipe.name})",
            hint=f"these are written: {', '.join(_WRITTEN)}",
        )
    with TemporaryDirectory(dir=into) as beside:
        written = write_decoder(weights, Path(beside))
        _check(facts, (written.layers, written.kv_heads, written.head_dim, written.vocabulary))
        _save(written.decoder, into / GRAPH_NAME, _WRITTEN[recipe.precision])
        if written.encoder is not None:
            _save(written.encoder, into / ENCODER_NAME, _WRITTEN[recipe.precision])


def _save(graph: Path, into: Path, bits: Bits | None) -> None:
    if bits is not None:
        quantised(graph, into, bits)
        return
    import onnx_ir as ir

    ir.save(ir.load(graph), into, external_data=f"{into.name}.data")


def _run_builder(weights: Path, recipe: DecoderRecipe, into: Path, cache: Path) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += [
        "--input",
        str(weights.absolute()),
        "--output",
        str(into),
        "--cache_dir",
        str(cache),
    ]
    command += ["--precision", recipe.precision]
    command += ["--execution_provider", _PROVIDERS[recipe.device]]
    command += ["--extra_options", *_ALWAYS, *recipe.options]
    done = subprocess.run(
        command, env=os.environ | _OFFLINE, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr, flush=True)  # into the log of the build
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise UnsupportedModel(
            f"onnxruntime-genai's model builder fails ({recipe.name}): {lines[-1]}",
            hint="the log has the whole story; another architecture may work",
        )


def _told(made: Path) -> _Numbers:
    told = json.loads((made / "genai_config.json").read_bytes())["model"]
    decoder = told["decoder"]
    return (
        decoder["num_hidden_layers"],
        decoder["num_key_value_heads"],
        decoder["head_size"],
        told["vocab_size"],
    )


def _check(facts: ModelFacts, made: _Numbers) -> None:
    """The graph's own numbers must be those that the manifest is going to have."""
    decoding = facts.decoding
    assert decoding is not None, "facts of a head NEXT_TOKEN have a decoding; this is a bug"
    due = (decoding.layers, decoding.kv_heads, decoding.head_dim, facts.width)
    if made != due:
        raise UnsupportedModel(
            f"the graph of `{facts.architecture}` has {made} layers, heads of keys and values, "
            f"values per head and words; config.json says {due}",
            hint="this release serves models whose layers are all alike",
        )
