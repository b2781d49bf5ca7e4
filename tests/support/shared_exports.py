"""Cache of exported tiny models for all tests, because torch takes seconds to trace each one."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.recipes import ExportRecipe
from build_artifacts.steps.export import export
from deployments.artifacts.locks import exclusive_lock
from tests.support.source_digests import REPOSITORY

KEPT_EXPORTS = REPOSITORY / "build" / "test-exports"  # `make clean` removes it
# Fields of the config that do not affect the graph.
_UNUSED = ("_name_or_path", "id2label", "label2id")


@dataclass(frozen=True)
class SharedExports:
    """Replacement of `export` that exports equal models once and then copies the stored graph.

    All test workers share `directory`.
    """

    directory: Path

    def __call__(
        self, model: TorchModel, metadata: CheckpointMetadata, recipe: ExportRecipe, graph: Path
    ) -> Path:
        stored = self.directory / f"{_digest(model, metadata, recipe)}.onnx"
        with exclusive_lock(stored.with_suffix(".lock"), lambda _: None):
            if not stored.exists():
                export(model, metadata, recipe, graph)
                shutil.copyfile(graph, stored.with_suffix(".new"))
                stored.with_suffix(".new").rename(stored)
        shutil.copyfile(stored, graph)
        return graph


def _digest(model: TorchModel, metadata: CheckpointMetadata, recipe: ExportRecipe) -> str:
    """Digest everything that `export` reads."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _UNUSED}
    pooling = (metadata.pooling, metadata.splade)
    reads: tuple[object, ...] = (type(model).__name__, metadata.head, pooling)
    reads = (*reads, metadata.max_tokens, metadata.has_token_types, recipe)
    digest = hashlib.sha256(json.dumps(config, default=str, sort_keys=True).encode())
    digest.update(repr((reads, model.config._attn_implementation)).encode())
    for layer in metadata.projection:
        digest.update(f"{layer}".encode() + layer.weight.tobytes())
        digest.update(b"" if layer.bias is None else layer.bias.tobytes())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()[:32]
