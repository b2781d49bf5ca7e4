"""Engine contracts on a GPU: ONNX Runtime with CUDA graphs, TensorRT, torch, and decoders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import ModelHead, Precision
from deployments.config import EncoderSettings, GeneratorSettings
from deployments.engines import missing_requirement, open_engine
from deployments.engines.decoder import DecoderEngine
from deployments.engines.onnx.decoder import OnnxDecoder
from deployments.engines.onnx.sessions import missing_provider
from deployments.engines.pytorch.decoder import TorchDecoder
from tests.integration.engines.conftest import BUCKETS, KINDS, ContractEngine, Written, spec_of
from tests.integration.engines.test_contract import ITEMS, check

pytestmark = pytest.mark.gpu

CUDA = ("CUDAExecutionProvider", "CPUExecutionProvider")
ONNX, TORCH = KINDS["onnxruntime"], KINDS["torch"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ONNX, EngineOptions()),
        (ONNX, EngineOptions(buckets=BUCKETS)),
        (ONNX, EngineOptions(buckets=BUCKETS, providers=("TensorrtExecutionProvider", *CUDA))),
        (TORCH, EngineOptions()),
        (TORCH, EngineOptions(buckets=BUCKETS)),
        (TORCH, EngineOptions(buckets=BUCKETS, compile=True)),
    ],
    ids=["cuda", "cuda-graphs", "tensorrt", "torch", "torch-in-buckets", "torch-compiled"],
)
@pytest.mark.parametrize("head", [ModelHead.VECTOR, ModelHead.TOKENS, ModelHead.MASKS])
def test_gpu_matches_expected_outputs(
    kind: ContractEngine, options: EngineOptions, head: ModelHead, written: Written
) -> None:
    encoder = EncoderSettings(providers=CUDA, concurrent_passes=2)
    spec = replace(spec_of(kind, Path("not yet written"), head), options=options)
    if reason := missing_requirement(spec, encoder):
        pytest.skip(reason)
    spec = replace(spec, path=written(kind, head))
    with closing(open_engine(spec, encoder)) as engine:
        for items in (ITEMS[:1], ITEMS[:3], ITEMS, ITEMS[:1]):
            check(engine, head, items)


class Uncaptured(TorchDecoder):
    """Decoder that launches every kernel of a step itself instead of replaying a CUDA graph."""

    def _find_call(self, _key: object, call: Callable[[], None]) -> Callable[[], None]:
        return call


def decoded(decoder: DecoderEngine) -> list[np.ndarray]:
    """Return logits of prefills and of steps with different numbers of slots.

    Repeated calls replay a CUDA graph.
    """
    lengths = np.array([30, 7, 30, 0])
    chunks = (
        (0, list(range(10, 28)), 0),
        (1, list(range(90, 83, -1)), 0),
        (0, list(range(28, 40)), 18),
    )
    steps = [decoder.prefill(*chunk).copy() for chunk in chunks]
    decoder.copy(0, 2, 30)
    for step, rows in enumerate((4, 1, 3, 3, 1, 4, 2)):
        ids = np.arange(rows) + 5 * step
        steps.append(decoder.decode(ids, lengths[:rows]).copy())
        lengths[:rows] += 1
    return steps


@pytest.mark.parametrize("kind", ["program", "checkpoint", "offloaded", "soft-caps", "experts"])
def test_captured_step_matches_uncaptured_step(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch", reason="`torch` is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    on_gpu, on_cpu = GeneratorSettings(providers=CUDA), GeneratorSettings()
    from tests.support.decoder_families import OWN, write_decoder
    from tests.support.decoder_programs import PROGRAM, WHOLE, program_spec, whole_spec
    from tests.support.tiny_decoders import tiny_llama

    # Both have sliding windows, the second sinks too. In bf16 a router may select another expert.
    others = {"soft-caps": "Gemma2ForCausalLM", "experts": "GptOssForCausalLM"}
    source, atol = tmp_path / "source", 2.0 if kind == "experts" else 0.5
    if name := others.get(kind):
        write_decoder(name, source, OWN[name])
    else:
        tiny_llama(source)
    if kind in ("checkpoint", "offloaded"):
        how = EngineOptions(kv_offload=kind == "offloaded")
        spec = whole_spec(source, tmp_path / kind, replace(WHOLE, precision="fp16", run=how))
    else:
        precision: Precision = "bf16" if kind == "experts" else "fp16"
        spec = program_spec(source, tmp_path, replace(PROGRAM, precision=precision))
    with (
        closing(TorchDecoder(spec, on_gpu, slots=4, context=128)) as captured,
        closing(Uncaptured(spec, on_gpu, slots=4, context=128)) as plain,
        closing(TorchDecoder(spec, on_cpu, slots=4, context=128)) as host,
    ):
        due = decoded(host)
        for decoder in (captured, plain):
            for steps, expected in zip(decoded(decoder), due, strict=True):
                np.testing.assert_allclose(steps, expected, atol=atol)
                assert np.abs(steps - expected).mean() < atol / 10
        for steps, expected in zip(decoded(captured), decoded(plain), strict=True):
            np.testing.assert_allclose(steps, expected, atol=0.01)


def test_onnx_decoder_on_gpu_matches_host(tmp_path: Path) -> None:
    on_gpu, on_cpu = GeneratorSettings(providers=CUDA), GeneratorSettings()
    if missing := missing_provider(CUDA):
        pytest.skip(f"onnxruntime has no `{missing}` here")
    from tests.support.decoder_graphs import CONTEXT, tiny_graph
    from tests.support.decoder_graphs import spec_of as decoder_spec

    graph = tiny_graph(tmp_path / "model.onnx", dtype=np.float16)
    spec = replace(decoder_spec(graph), precision="fp16")
    with (
        closing(OnnxDecoder(spec, on_gpu, slots=4, context=CONTEXT)) as device,
        closing(OnnxDecoder(spec, on_cpu, slots=4, context=CONTEXT)) as host,
    ):
        for steps, due in zip(decoded(device), decoded(host), strict=True):
            np.testing.assert_allclose(steps, due, atol=0.05)
