from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from build_artifacts.checkpoints.models import TorchModel, load_model
from build_artifacts.encoders.candidates import build_graph_spec
from build_artifacts.encoders.probes import tokenize_texts
from build_artifacts.encoders.reference_engine import TorchReferenceEngine
from build_artifacts.errors import UnsupportedModel
from build_artifacts.presets import CPU_INT8, GPU_FP16
from build_artifacts.recipes import CPU_FP32, ExportRecipe
from build_artifacts.steps.export import export
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device, ModelHead
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec, open_engine
from deployments.tuning.parity import cosines, run_probes
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.prepared_build import PreparedBuild
from tests.support.tiny_encoders import tiny_checkpoint

SETTINGS = EncoderSettings()
TEXTS = ("the lovely [MASK]", ("a [MASK] river", "it is [MASK] and bad"))


@pytest.mark.parametrize("head", [ModelHead.MASKS, ModelHead.SPAN])
def test_half_precision_graph_matches_fp32(head: ModelHead, tmp_path: Path) -> None:
    """The graph of the candidate GPU_FP16 runs here on the CPU provider."""
    assert isinstance(GPU_FP16.source, ExportRecipe)
    source = tiny_checkpoint(tmp_path / "model", head=head, layers=1)
    metadata = read_checkpoint_metadata(source)
    half = load_model(source, head=head, dtype="float16")
    spec = GraphSpec(
        path=export(half, metadata, GPU_FP16.source, tmp_path / "graph.onnx"),
        device=Device.GPU,
        precision="fp16",
        engine="onnxruntime",
        options=EngineOptions(),
        head=head,
        mask_token=metadata.mask_token,
    )
    items = tokenize_texts(source, metadata.max_tokens, TEXTS)
    single = TorchReferenceEngine(load_model(source, head=head, dtype="float32"), metadata)
    given = run_probes(open_engine(spec, EncoderSettings()), items, 2)
    for mine, due in zip(given, run_probes(single, items, 1), strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, due, atol=0.05, rtol=0.01)  # for logits up to 20


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_vector_graph_outputs_unpooled_tokens(pooling: str, tmp_path: Path) -> None:
    """Token vectors of the rewritten graph and of its int8 copy match torch."""
    import torch

    source = tiny_checkpoint(tmp_path / "model", pooling=pooling)
    shop = PreparedBuild.of(source, tmp_path / "work")
    batch = collate(shop.items[:4], unpooled=True)
    model = shop.prepared.model("float32")
    with torch.inference_mode():
        inputs = (torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask))
        hidden = model(*inputs).last_hidden_state.numpy()
    due = [hidden[i, :length] for i, length in enumerate(batch.lengths)]
    for recipe, least in ((CPU_FP32, 1 - 1e-6), (CPU_INT8, 0.95)):
        engine = open_engine(
            build_graph_spec(recipe, shop.graphs.graph(recipe), shop.prepared), SETTINGS
        )
        given = engine.run(batch).items
        assert [rows.shape for rows in given] == [rows.shape for rows in due]
        assert cosines(given, due).min() > least
        if recipe is CPU_FP32:
            np.testing.assert_allclose(np.concatenate(given), np.concatenate(due), atol=1e-4)


def test_only_vector_graphs_have_second_output(tmp_path: Path) -> None:
    for head, names in ((ModelHead.VECTOR, ["output", "tokens"]), (ModelHead.TOKENS, ["output"])):
        source = tiny_checkpoint(tmp_path / head, head=head, layers=1)
        model = load_model(source, head=head, dtype="float32")
        assert isinstance(CPU_FP32.source, ExportRecipe)
        graph = export(
            model, read_checkpoint_metadata(source), CPU_FP32.source, tmp_path / f"{head}.onnx"
        )
        assert [output.name for output in onnx.load(graph).graph.output] == names


def test_export_leaves_model_unchanged(tmp_path: Path) -> None:
    assert isinstance(CPU_FP32.source, ExportRecipe)
    source = tiny_checkpoint(tmp_path / "model", layers=1)
    metadata = read_checkpoint_metadata(source)
    model = load_model(source, head=metadata.head, dtype="float32")
    items = tokenize_texts(source, metadata.max_tokens, TEXTS)
    kind, before = type(model), run_probes(TorchReferenceEngine(model, metadata), items, 1)
    export(model, metadata, CPU_FP32.source, tmp_path / "graph.onnx")
    assert type(model) is kind
    assert model.training is False
    for mine, due in zip(
        run_probes(TorchReferenceEngine(model, metadata), items, 1), before, strict=True
    ):
        np.testing.assert_array_equal(mine, due)


def untraceable(model: TorchModel) -> TorchModel:
    """Return the model with a value-dependent branch, which cannot be traced."""

    class Choosy(type(model)):
        def forward(self, input_ids: object, **rest: object) -> object:
            if input_ids.sum() > 7:
                return super().forward(input_ids=input_ids, **rest)
            return super().forward(input_ids=input_ids * 0, **rest)

    model.__class__ = Choosy
    return model


def test_untraceable_model_is_rejected_by_name(tmp_path: Path) -> None:
    assert isinstance(CPU_FP32.source, ExportRecipe)
    source = tiny_checkpoint(tmp_path / "model", layers=1)
    model = untraceable(load_model(source, head=ModelHead.VECTOR, dtype="float32"))
    with pytest.raises(UnsupportedModel, match="`BertModel` cannot be exported"):
        export(model, read_checkpoint_metadata(source), CPU_FP32.source, tmp_path / "graph.onnx")
    assert not (tmp_path / "graph.onnx").exists()
