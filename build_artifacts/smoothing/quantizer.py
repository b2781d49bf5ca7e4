"""Static int8 of an encoder: a token has the same values in every batch.

Dynamic quantization takes one range for all activations of a tensor, so that a text depends on the
texts beside it. Here ranges are constants from calibration texts. Constant ranges need activations
without outliers:

- The output of a norm is centered and evened channel by channel. The norm divides by the factors,
  the weights of the products that read it take them, and the residual stream is scaled back.
- The product that a gated layer multiplies takes the factors into its columns.
- Neurons whose rectified output exceeds the range of a byte get copies with a smaller bias.
- The output of attention needs nothing: it consists of means of values.

Products to which none of this applies stay float.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from build_artifacts.recipes import SmoothedInt8
from build_artifacts.smoothing.activations import ActivationSmoother
from build_artifacts.smoothing.calibration import CalibrationInputs, observe
from build_artifacts.smoothing.graph_edits import GraphEditor
from build_artifacts.smoothing.products import find_products, find_wide_heads, group_by_source
from build_artifacts.smoothing.ranges import ByteRange
from build_artifacts.smoothing.writing import ProductWriter, quantize_word_table


def quantize_smoothed(
    graph: Path,
    scheme: SmoothedInt8,
    into: Path,
    feeds: Sequence[CalibrationInputs],
    excluded_nodes: Collection[str],
) -> list[str]:
    """Write an int8 copy of the float `graph` to `into`, calibrated by `feeds`, one text each.

    Return the names of the MatMuls that stay float and are large: `excluded_nodes`, those of layers
    whose activations have no constant range, and wide heads.
    """
    import onnx
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    model = ir.load(graph)
    products = find_products(model)
    editor = GraphEditor(model)
    smoother = ActivationSmoother(editor, products)
    static = {
        source: readers
        for source, readers in group_by_source(products).items()
        if any(product.name not in excluded_nodes for product in readers)
        and smoother.can_smooth(source, readers)
    }
    observed = observe(onnx.load(graph), [str(source.name) for source in static], feeds)
    ranges: dict[ir.Value, ByteRange] = {
        source: smoother.smooth(source, readers, observed[str(source.name)])
        for source, readers in static.items()
    }
    smoother.equalize_widths()
    writer, floating = ProductWriter(editor, scheme), find_wide_heads(model, products)
    for product in products:
        byte_range = None if product.name in excluded_nodes else ranges.get(product.source)
        floating += [product.name] if byte_range is None else []
        writer.write(product, byte_range)
    quantize_word_table(model, editor)
    RemoveUnusedNodesPass()(model)
    ir.save(model, into)
    return floating
