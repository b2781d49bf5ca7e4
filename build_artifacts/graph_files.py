"""Files of an ONNX graph: the graph, and for a large model a second file with its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from build_artifacts.errors import UnsupportedModel, first_line

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime as ort

# A graph file without a weight file is one protobuf message, limited to 2 GiB. 8 MiB are left for
# the nodes.
MAX_GRAPH_BYTES = (2 << 30) - (8 << 20)


def find_weight_file(graph: Path) -> Path:
    """Return the path of the weight file of `graph`. Small graphs have no such file."""
    return graph.with_name(f"{graph.name}.data")


def list_files(graph: Path) -> list[Path]:
    """Return `graph` and its weight file if there is one."""
    weights = find_weight_file(graph)
    return [graph, weights] if weights.is_file() else [graph]


def format_size(*paths: Path) -> str:
    """Format the total size of the files in MB."""
    return f"{sum(path.stat().st_size for path in paths) / 1e6:.1f} MB"


def save_graph(model: ir.Model, path: Path) -> None:
    """Write the model, with a weight file if its weights exceed MAX_GRAPH_BYTES."""
    import onnx_ir as ir

    tensors = [value.const_value for value in model.graph.initializers.values()]
    if sum(tensor.nbytes for tensor in tensors if tensor is not None) > MAX_GRAPH_BYTES:
        ir.save(model, path, external_data=find_weight_file(path).name)
        return
    # Load external weights first. Otherwise the new graph would refer to the old weight file.
    ir.external_data.load_to_model(model)
    ir.save(model, path)


@contextmanager
def session_errors() -> Iterator[None]:
    """Convert errors of ONNX Runtime about a float graph to UnsupportedModel.

    A lack of memory stays as it is: it says nothing about the graph, and a later build resumes.
    """
    try:
        yield
    except Exception as exc:  # the errors of ONNX Runtime have no other common base
        if not type(exc).__module__.startswith("onnxruntime") or "alloc" in str(exc):
            raise
        raise UnsupportedModel(
            f"ONNX Runtime does not run the exported graph: {first_line(exc)}",
            hint="the exporter does not support this variant of the architecture; use another one",
        ) from exc


def open_with_outputs(
    graph: Path, outputs: list[str], level: ort.GraphOptimizationLevel
) -> ort.InferenceSession:
    """Open `graph` on the CPU so that it returns the intermediate values named `outputs`."""
    import onnx
    import onnxruntime as ort
    from onnx import helper

    model = onnx.load(graph, load_external_data=False)
    del model.graph.output[:]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    # A model in memory has no directory, so state where its weight file is.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(graph.parent)
    )
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
