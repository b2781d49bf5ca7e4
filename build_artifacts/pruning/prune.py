"""Structured pruning: sets the least important heads and feed-forward channels to zero.

Heads are ranked over all layers. Every layer loses the same number of feed-forward channels. A
forward pass can then reuse the memory of one layer for the next. The number of channels that a
layer retains is a multiple of `_CHANNELS`, so that kernels fill whole registers.

The retained channels approximate the removed channels by least squares on the calibration items.
This is the mask tuning of Kwon et al., 2022, with a full matrix instead of scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.checkpoint import copy_without_weights
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import TorchModel, load_model
from build_artifacts.compaction.find import find_compaction
from build_artifacts.compaction.layers import ChannelGroups, EncoderLayer, encoder_layers
from build_artifacts.compaction.layouts import LAYOUTS
from build_artifacts.errors import UnsupportedModel
from build_artifacts.evaluation import digest_data
from build_artifacts.pruning.importance import LayerStatistics, measure
from build_artifacts.types import TorchTensor
from deployments.artifacts.manifest import PruningSource
from deployments.messages import TokenizedItem

_CHANNELS = 16
_RIDGE = 1e-3  # ridge of the least squares, relative to the mean square of a channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """Share to prune, and the data that determine the importance of heads and channels."""

    fraction: float  # share of the heads and of the feed-forward channels, between 0 and 1
    data: Path | None = None  # file in a format of `--eval`, labels unused; None: built-in texts


def describe_pruning(pruning: Pruning) -> PruningSource:
    """Return the fraction and the digest of the data. Raises BuildError for unreadable data."""
    digest = None if pruning.data is None else digest_data(pruning.data, "--prune-data")
    return PruningSource(fraction=pruning.fraction, data=digest)


def prune_checkpoint(
    weights: Path,
    metadata: CheckpointMetadata,
    fraction: float,
    items: Sequence[TokenizedItem],
    into: Path,
) -> str:
    """Write the pruned checkpoint to `into`. Return a line about what compaction can remove.

    Pruned parts are zero. The shapes are unchanged, so any tool can load the result. Raises
    UnsupportedModel if the model cannot be loaded or pruned.
    """
    model = load_model(weights, head=metadata.loaded_head, dtype="float32", is_checked=True)
    prune(model, fraction, metadata, items)
    model.save_pretrained(into)
    # Copy last, to replace the saved config.json, which may name another class.
    copy_without_weights(weights, into, weights=weights)
    return find_compaction(model).describe()


def prune(
    model: TorchModel,
    fraction: float,
    metadata: CheckpointMetadata,
    items: Sequence[TokenizedItem],
) -> None:
    """Prune an fp32 `model` in place; each layer retains at least one head.

    The weight columns that read a removed head or channel become zero. The other columns and the
    bias change to compensate for the zeros. Raises UnsupportedModel if the layers of this
    architecture are not known.
    """
    layers = encoder_layers(model)
    if not layers:
        raise UnsupportedModel(
            f"`{model.config.model_type}` cannot be pruned: its layers are not known",
            hint=f"omit `--prune`; known architectures: {', '.join(LAYOUTS)}",
        )
    statistics = measure(model, layers, metadata, items)
    for layer, seen, heads in zip(
        layers, statistics, _select_heads(layers, statistics, fraction), strict=True
    ):
        _remove(layer.heads, heads, seen.heads.moments)
        channels = _select_channels(layer.ffn_channels, seen.ffn_channels.importance, fraction)
        _remove(layer.ffn_channels, channels, seen.ffn_channels.moments)


def _select_heads(
    layers: Sequence[EncoderLayer], statistics: Sequence[LayerStatistics], fraction: float
) -> list[list[int]]:
    """Return the least important heads, by layer. Every layer retains at least one head."""
    ranked = sorted(
        (importance, layer, head)
        for layer, seen in enumerate(statistics)
        for head, importance in enumerate(seen.heads.importance.tolist())
    )
    selected: list[list[int]] = [[] for _ in layers]
    missing = round(fraction * len(ranked))
    for _, layer, head in ranked:
        if missing and len(selected[layer]) < layers[layer].heads.count - 1:
            selected[layer].append(head)
            missing -= 1
    return selected


def _select_channels(groups: ChannelGroups, importance: TorchTensor, fraction: float) -> list[int]:
    retained = -(-round((1 - fraction) * groups.count) // _CHANNELS) * _CHANNELS
    removed = max(groups.count - max(retained, 1), 0)
    selected: list[int] = importance.argsort(stable=True)[:removed].tolist()
    return selected


def _remove(groups: ChannelGroups, removed: Sequence[int], moments: TorchTensor) -> None:
    """Move the contribution of `removed` groups to the other groups, then zero the removed columns.

    `moments` are those of `importance.GroupStatistics` for `groups`, [C + 1, C + 1].
    """
    import torch

    if not removed:
        return
    sink = groups.sink
    is_removed = torch.zeros(groups.count, dtype=torch.bool)
    is_removed[list(removed)] = True
    is_removed = is_removed.repeat_interleave(groups.width)
    is_kept = torch.cat([~is_removed, torch.tensor([True])])  # the constant 1 represents the bias
    is_removed = torch.cat([is_removed, torch.tensor([False])])
    squares = moments[is_kept][:, is_kept].double()
    ridge = _RIDGE * squares.diagonal()[:-1].mean() + torch.finfo(torch.float32).tiny
    squares.diagonal()[:-1].add_(ridge)
    # [kept channels + 1, removed channels]
    coefficients = torch.linalg.solve(squares, moments[is_kept][:, is_removed].double())
    with torch.no_grad():
        update = sink.weight[:, is_removed[:-1]].double() @ coefficients.T
        sink.weight[:, is_kept[:-1]] += update[:, :-1].to(sink.weight.dtype)
        sink.bias += update[:, -1].to(sink.bias.dtype)
        sink.weight[:, is_removed[:-1]] = 0
