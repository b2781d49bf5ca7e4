"""Static int8 of an encoder: a token has the same values in every batch.

Dynamic quantization uses one range for a whole tensor, so the output of a text depends on the other
texts in the batch. Here, ranges are constants from calibration texts. Constant ranges require
activations without outliers:

- Outputs of norms and of products (MatMuls with constant weights) are centered and equalized: each
  channel is divided by a factor. Outputs of RMS norms cannot be centered. The norm or product
  absorbs the change, and the products that read the output absorb the reverse. Other readers, such
  as the residual stream, get the original values.
- The linear half of a gated layer absorbs the division in the columns of its product.
- The range of rectified neurons may end below their largest outputs. A neuron then returns at most
  the end of the range, and copies of it with a smaller bias return the excess.
- Neurons of gated layers may instead get the range of each token, which is more accurate and
  slower. It does not depend on other tokens either.
- Outputs of attention need no change, because they are means of value vectors and therefore stay
  within the range of these vectors.

Products that read other activations stay float.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from build_artifacts.graph_files import save_graph
from build_artifacts.recipes import SmoothedInt8
from build_artifacts.smoothing.activations import ActivationSmoother
from build_artifacts.smoothing.calibration import CalibrationInputs, observe
from build_artifacts.smoothing.graph_edits import GraphEditor
from build_artifacts.smoothing.products import (
    find_products,
    find_wide_heads,
    fold_transposes,
    group_by_source,
)
from build_artifacts.smoothing.ranges import ByteRange, TokenRange
from build_artifacts.smoothing.writing import ProductWriter, quantize_word_table
from deployments.engines.graph_io import MASK_POSITIONS


def quantize_smoothed(
    graph: Path,
    scheme: SmoothedInt8,
    into: Path,
    feeds: Sequence[CalibrationInputs],
    excluded_nodes: Collection[str],
) -> list[str]:
    """Write an int8 copy of the float `graph` to `into`, calibrated by `feeds`, one text each.

    Return the names of the MatMuls that the copy has in float: `excluded_nodes`, layer MatMuls
    without a constant activation range, and wide heads. The list lacks small heads, which also
    stay float.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    model = ir.load(graph)
    editor = GraphEditor(model)
    # A sparse encoder runs its vocabulary head for all tokens, a fill-mask model for few.
    if all(value.name != MASK_POSITIONS for value in model.graph.inputs):
        fold_transposes(model, editor)
    products = find_products(model)
    smoother = ActivationSmoother(editor, products)
    static = {
        source: readers
        for source, readers in group_by_source(products).items()
        if any(product.name not in excluded_nodes for product in readers)
        and smoother.can_smooth(source, readers)
    }
    observed = observe(graph, [str(source.name) for source in static], feeds)
    gated = {source for source, readers in static.items() if smoother.is_gated(source, readers)}
    ranges: dict[ir.Value, ByteRange | TokenRange] = {
        source: smoother.smooth(source, readers, observed[str(source.name)])
        for source, readers in static.items()
    }
    if scheme.gated_ranges == "token":
        ranges |= dict.fromkeys(gated, TokenRange())
    smoother.equalize_widths()
    writer, floating = ProductWriter(editor, scheme), find_wide_heads(model, products)
    for product in products:
        byte_range = None if product.name in excluded_nodes else ranges.get(product.source)
        floating += [product.name] if byte_range is None else []
        writer.write(product, byte_range)
    quantize_word_table(model, editor)
    RemoveUnusedNodesPass()(model)
    save_graph(model, into)
    return floating


def has_gated_layers(graph: Path) -> bool:
    """Return whether the float `graph` has layers to which `gated_ranges` of a scheme applies."""
    import onnx_ir as ir

    model = ir.load(graph)
    products = find_products(model)
    smoother = ActivationSmoother(GraphEditor(model), products)
    by_source = group_by_source(products).items()
    return any(smoother.is_gated(source, readers) for source, readers in by_source)
