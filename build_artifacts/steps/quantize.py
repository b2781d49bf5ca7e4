"""int8 quantization of float graphs: dynamic, static, smoothed or weights only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from build_artifacts.errors import UnsupportedModel, convert_library_error
from build_artifacts.graph_files import MAX_GRAPH_BYTES, find_weight_file
from build_artifacts.recipes import (
    CalibrationMethod,
    DynamicInt8,
    NncfInt8,
    Quantization,
    SmoothedInt8,
    StaticInt8,
    WeightOnlyInt8,
)
from build_artifacts.smoothing.quantizer import quantize_smoothed
from deployments.batching.batch_policy import collate
from deployments.engines.graph_io import build_feeds
from deployments.engines.openvino_engine import disable_telemetry
from deployments.host.machine import read_cpu_info
from deployments.messages import TokenizedItem

if TYPE_CHECKING:
    import onnx
    from onnxruntime.quantization import QuantType

# ONNX Runtime and NNCF store all activations of all items for calibration, so the number of items
# and their length are limited. Smoothed int8 limits only the length.
CALIBRATION_ITEMS = 24
CALIBRATION_TOKENS = 128
# Entropy calibration searches the range whose 128 levels lose the least information. ONNX Runtime's
# default of 128 histogram bins allows only one range. The time grows with the square of the number
# of bins.
_ENTROPY_BINS = 512
# Maximum size of a float graph for NNCF: 1.3 GB (BERT-large) took 17 GB of memory.
MAX_NNCF_BYTES = 600 << 20
# Number of consecutive values of a weight column that share a scale in `excluded_nodes`. Smaller
# blocks are slower.
EXCLUDED_BLOCK_SIZE = 128


def quantize(
    graph: Path,
    scheme: Quantization,
    into: Path,
    *,
    items: Sequence[TokenizedItem],
    excluded_nodes: Collection[str] = (),
) -> None:
    """Write a quantized copy of the float `graph` to `into`.

    Static schemes calibrate activation ranges with `items`. `excluded_nodes` get int8 weights in
    small blocks, which takes half the time of float at nearly the same accuracy. In a SmoothedInt8
    graph with the layout "pairs", these nodes stay float. NncfInt8 and WeightOnlyInt8 ignore
    `excluded_nodes`. Raises UnsupportedModel if the quantizer fails, OSError if files cannot be
    read or written.
    """
    try:
        _Quantizer(graph, into, items, excluded_nodes).quantize(scheme)
    except OSError:
        raise
    except Exception as exc:  # quantizers raise any exception on unexpected graphs
        raise convert_library_error(
            exc,
            f"{type(scheme).__name__} failed on this graph",
            hint="the build log has the details; other candidates do not depend on this one",
        ) from exc


@dataclass(frozen=True, slots=True)
class _Quantizer:
    """Quantizer of the float `graph` to the file `into`; the other fields are as in `quantize`."""

    graph: Path
    into: Path
    items: Sequence[TokenizedItem]
    excluded_nodes: Collection[str]

    def quantize(self, scheme: Quantization) -> None:
        match scheme:
            case DynamicInt8():
                self._quantize_dynamic(scheme)
            case StaticInt8():
                self._quantize_static(scheme)
            case SmoothedInt8():
                self._quantize_smoothed(scheme)
            case NncfInt8():
                self._quantize_with_nncf()
            case WeightOnlyInt8():
                _quantize_weights(_load_graph(self.graph), scheme.block, None, self.into)

    def _quantize_dynamic(self, scheme: DynamicInt8) -> None:
        from onnxruntime.quantization import quantize_dynamic

        model = _load_graph(self.graph)
        quantize_dynamic(
            model,
            self.into,
            weight_type=_choose_weight_type(model),
            per_channel=True,
            op_types_to_quantize=list(scheme.op_types),
            nodes_to_exclude=list(self.excluded_nodes),
            extra_options={"WeightSymmetric": scheme.symmetric_weights, **_FLOAT},
        )
        self._quantize_in_blocks(self.excluded_nodes)

    def _quantize_static(self, scheme: StaticInt8) -> None:
        from onnxruntime.quantization import CalibrationMethod as OrtCalibration
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

        methods: dict[CalibrationMethod, OrtCalibration] = {
            "minmax": OrtCalibration.MinMax,
            "percentile": OrtCalibration.Percentile,
            "entropy": OrtCalibration.Entropy,
        }
        model = _load_graph(self.graph)
        reader = _CalibrationReader(
            _truncate_to_equal_length(self.items), [value.name for value in model.graph.input]
        )
        with TemporaryDirectory() as temporary:
            ranges = Path(temporary, "ranges.json")
            if scheme.calibration == "entropy":
                _write_entropy_ranges(model, scheme, reader, ranges)
            quantize_static(
                model,
                self.into,
                reader,
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(scheme.op_types),
                nodes_to_exclude=[*self.excluded_nodes, *_find_products_of_activations(model)],
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=_choose_weight_type(model),
                calibrate_method=methods[scheme.calibration],
                # Symmetric weights: int8 kernels of other engines require them.
                extra_options={
                    "WeightSymmetric": True,
                    # Consumers quantize their inputs, so a quantized output would be rounded twice.
                    "OpTypesToExcludeOutputQuantization": ["MatMul"],
                    **_FLOAT,
                },
                calibration_cache_path=ranges,
            )
        self._quantize_in_blocks(self.excluded_nodes)

    def _quantize_smoothed(self, scheme: SmoothedInt8) -> None:
        import onnx

        model = onnx.load(self.graph, load_external_data=False)
        names = [value.name for value in model.graph.input]
        feeds = list(_calibration_feeds(map(_truncate, self.items), names))
        floating = quantize_smoothed(self.graph, scheme, self.into, feeds, self.excluded_nodes)
        if scheme.layout == "operators":
            self._quantize_in_blocks(floating)

    def _quantize_with_nncf(self) -> None:
        import onnx

        size = self.graph.stat().st_size
        if size > MAX_NNCF_BYTES:
            raise UnsupportedModel(
                f"the graph takes {size / 1e9:.1f} GB; the maximum for NNCF is "
                f"{MAX_NNCF_BYTES / 1e9:.1f} GB",
                hint="use other int8 candidates",
            )
        disable_telemetry()
        import nncf
        from nncf.quantization.advanced_parameters import (
            AdvancedQuantizationParameters,
            OverflowFix,
        )

        # NNCF requires recorded shapes and does not infer them.
        model = onnx.shape_inference.infer_shapes(_load_graph(self.graph))
        chosen = _truncate_to_equal_length(self.items)
        feeds = list(_calibration_feeds(chosen, [value.name for value in model.graph.input]))
        quantized = nncf.quantize(
            model,
            nncf.Dataset(feeds),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(feeds),
            advanced_parameters=AdvancedQuantizationParameters(
                # On a CPU whose int8 sums overflow, quantize all weights to 7 bits (ENABLE). The
                # default, FIRST_LAYER, does so for some weights only.
                overflow_fix=OverflowFix.ENABLE
                if read_cpu_info().int8_overflows
                else OverflowFix.FIRST_LAYER,
            ),
        )
        onnx.save(quantized, self.into)

    def _quantize_in_blocks(self, nodes: Collection[str]) -> None:
        """Quantize the weights of `nodes`, which the quantized graph has in float."""
        import onnx

        if nodes:
            _quantize_weights(onnx.load(self.into), EXCLUDED_BLOCK_SIZE, nodes, self.into)


def _load_graph(graph: Path) -> onnx.ModelProto:
    import onnx

    # Except for smoothed int8, quantizers serialize the model as one protobuf message.
    if find_weight_file(graph).exists():
        raise UnsupportedModel(
            f"the float graph exceeds the {MAX_GRAPH_BYTES / 2**30:.1f} GiB of this quantizer",
            hint="use the candidates of smoothed int8",
        )
    model = onnx.load(graph)
    # ONNX Runtime transposes Gemm weights but keeps the recorded shapes, and its shape inference
    # then rejects these shapes. Without recorded shapes, ONNX Runtime infers all shapes.
    del model.graph.value_info[:]
    return model


def _choose_weight_type(model: onnx.ModelProto) -> QuantType:
    """Return uint8 if several products read one weight, as in ALBERT, else int8.

    On CPUs without VNNI, ONNX Runtime converts int8 weights to uint8 once per reader, and fails
    when it adds the same weight again.
    """
    from onnxruntime.quantization import QuantType

    constants = {table.name for table in model.graph.initializer}
    read = [node.input[1] for node in model.graph.node if node.op_type == "MatMul"]
    readers = Counter(name for name in read if name in constants)
    return QuantType.QUInt8 if max(readers.values(), default=0) > 1 else QuantType.QInt8


def _find_products_of_activations(model: onnx.ModelProto) -> list[str]:
    """Return the names of the MatMuls without constant weights, such as the pooling MatMul."""
    constants = {table.name for table in model.graph.initializer}
    products = (node for node in model.graph.node if node.op_type == "MatMul")
    return [node.name for node in products if node.input[1] not in constants]


def _write_entropy_ranges(
    model: onnx.ModelProto, scheme: StaticInt8, reader: _CalibrationReader, ranges: Path
) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationMethod as OrtCalibration
    from onnxruntime.quantization import create_calibrator, save_tensors_data

    float_graph = ranges.with_name("float.onnx")
    onnx.save(model, float_graph)
    calibrator = create_calibrator(
        float_graph,
        list(scheme.op_types),
        augmented_model_path=str(ranges.with_name("observed.onnx")),
        calibrate_method=OrtCalibration.Entropy,
        extra_options={"num_bins": _ENTROPY_BINS},
    )
    calibrator.collect_data(reader)
    save_tensors_data(calibrator.compute_data(), ranges)


# ONNX Runtime's option for tensors without an inferred type: 1 means float32.
_FLOAT = {"DefaultTensorType": 1}


def _quantize_weights(
    model: onnx.ModelProto, block: int, nodes: Collection[str] | None, into: Path
) -> None:
    """Write the model with `MatMulNBits` for MatMuls with constant weights.

    `nodes` names the MatMuls to replace; None: all.
    """
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    # The quantizer's option `nodes_to_include` does not restrict it to these nodes, so exclude the
    # other MatMuls.
    matmuls = [node.name for node in model.graph.node if node.op_type == "MatMul"]
    quantizer = MatMulNBitsQuantizer(
        model,
        bits=8,
        block_size=block,
        is_symmetric=True,
        accuracy_level=4,  # int8 MatMuls
        nodes_to_exclude=[] if nodes is None else [n for n in matmuls if n not in nodes],
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(into), use_external_data_format=False)


class _CalibrationReader:
    """Data reader for ONNX Runtime's calibration, one item per forward pass."""

    def __init__(self, items: Sequence[TokenizedItem], names: Sequence[str]) -> None:
        self._feeds = _calibration_feeds(items, names)

    def get_next(self) -> dict[str, NDArray[np.int64]] | None:
        return next(self._feeds, None)

    def __iter__(self) -> Iterator[dict[str, NDArray[np.int64]]]:
        return self._feeds


def _truncate_to_equal_length(items: Sequence[TokenizedItem]) -> list[TokenizedItem]:
    """Truncate the longest items to one length, because histograms require equal shapes.

    Return at most CALIBRATION_ITEMS items. Each keeps its last token.
    """
    chosen = sorted(items, key=lambda item: -len(item.ids))[:CALIBRATION_ITEMS]
    length = min(CALIBRATION_TOKENS, *(len(item.ids) for item in chosen))
    return [_truncate(item, length) for item in chosen]


def _truncate(item: TokenizedItem, length: int = CALIBRATION_TOKENS) -> TokenizedItem:
    """Truncate to at most `length` tokens, but keep the last token, such as [SEP]."""
    ids, second_segment_start = item
    length = min(length, len(ids))
    return TokenizedItem(np.append(ids[: length - 1], ids[-1]), min(second_segment_start, length))


def _calibration_feeds(
    items: Iterable[TokenizedItem], names: Sequence[str]
) -> Iterator[dict[str, NDArray[np.int64]]]:
    for item in items:
        yield build_feeds(collate([item]), names, None).arrays
