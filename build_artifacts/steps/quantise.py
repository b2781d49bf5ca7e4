"""Step 4: an fp32 graph becomes an int8 graph."""

from __future__ import annotations

from pathlib import Path

from build_artifacts.recipe import Int8Scheme


def quantise(graph: Path, scheme: Int8Scheme, into: Path) -> Path:
    """Write an int8 copy of `graph` to `into`: int8 weights, activations scaled at run time."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(graph)
    # onnxruntime transposes the weights of Gemm and leaves their recorded shapes as they were,
    # which its own shape inference then refuses. Without the record it infers them afresh.
    del model.graph.value_info[:]
    quantize_dynamic(
        model,
        into,
        weight_type=QuantType.QInt8,
        per_channel=scheme.per_channel,
        op_types_to_quantize=list(scheme.op_types),
        extra_options={"WeightSymmetric": scheme.symmetric_weights},
    )
    return into
