"""xIELU, an activation with two learned factors per layer (https://arxiv.org/abs/2411.13010)."""

from __future__ import annotations

import numpy as np

from build_artifacts.decoders.graphs.graph import GraphWriter
from build_artifacts.decoders.graphs.operators import Value
from build_artifacts.types import FloatArray


def apply_xielu(graph: GraphWriter, value: Value, module: str) -> Value:
    """Apply the activation with the factors of `module` to a value of any shape.

    p and n are the learned factors for positive and for negative values, b is a constant:

        x > 0:   p x^2 + b x
        x <= 0:  n (exp(x) - 1 - x) + b x

    transformers uses exp(-1e-6) for values between that number and 0, which changes results by up
    to n times that number.
    """
    weights = graph.weights

    def read(part: str) -> FloatArray:
        return weights.read(f"{module}.{part}").reshape(1)

    def read_positive() -> FloatArray:
        return np.logaddexp(0, read("alpha_p"), dtype=np.float32)

    def read_negative() -> FloatArray:
        return read("beta") + np.logaddexp(0, read("alpha_n"), dtype=np.float32)

    positive, negative, linear, rest = (
        graph.weight(f"{module}.{name}", (1,), factor)
        for name, factor in (
            ("positive", read_positive),
            ("negative", read_negative),
            ("linear", lambda: read("beta")),
            ("rest", lambda: read("beta") - read_negative()),
        )
    )
    above = graph.op("Relu", value)
    below = graph.op("Sub", value, above)
    # ONNX Runtime's Elu would save operators, but it rounds a value differently among others.
    exponential = graph.op("Sub", graph.op("Exp", below), graph.constant(1.0))
    slope = graph.op("Add", graph.op("Mul", above, positive), linear)
    parts = [
        graph.op("Mul", above, slope),
        graph.op("Mul", exponential, negative),
        graph.op("Mul", below, rest),
    ]
    return graph.op("Add", graph.op("Add", parts[0], parts[1]), parts[2])
