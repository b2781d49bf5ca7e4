from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import find_source, open_torch
from deployments.artifacts.manifest import ModelSource
from deployments.batching.batch_policy import collate
from tests.support.artifacts import tiny_manifest
from tests.support.fakes import item
from tests.support.tiny_encoders import HIDDEN, tiny_checkpoint


def test_open_torch_returns_pooled_outputs(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel

    source = tiny_checkpoint(tmp_path / "model")
    eager = open_torch(str(source), tiny_manifest(), tmp_path, threads=torch.get_num_threads())
    short, long = item(7, 3), item(11, 9)
    rows = np.asarray(eager.run(collate([short, long])).items)
    assert rows.shape == (2, HIDDEN)
    reference = AutoModel.from_pretrained(source).eval()
    with torch.inference_mode():
        hidden = reference(input_ids=torch.from_numpy(short.ids.astype(np.int64))[None])
    np.testing.assert_allclose(rows[0], hidden.last_hidden_state[0].mean(0).numpy(), atol=1e-5)


def test_find_source_rejects_a_merged_adapter() -> None:
    manifest = tiny_manifest()
    assert find_source(manifest) == manifest.source.ref
    merged = ModelSource(ref="base", revision="1", adapter="lora", adapter_revision="2")
    with pytest.raises(BenchmarkError, match="contains a merged adapter"):
        find_source(manifest.model_copy(update={"source": merged}))
