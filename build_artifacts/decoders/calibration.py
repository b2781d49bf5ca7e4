"""Activations and KV caches of a float graph on a few hundred calibration tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.graph_files import session_errors
from build_artifacts.types import FloatArray, Tokens
from deployments.artifacts.generation_config import GenerationConfig
from deployments.engines.decoder import LOGITS_FROM, PAST_STATES

if TYPE_CHECKING:
    import onnx

SCALE_MARGIN = 1.1  # headroom of a static scale for values larger than in the calibration texts


class CalibrationTexts(NamedTuple):
    """Calibration texts of a decoder-only model.

    The methods run its float graph on the texts. They raise UnsupportedModel if it does not run.
    """

    texts: Sequence[Tokens]
    generation_config: GenerationConfig

    def observe(
        self, graph: Path, values: Sequence[str], scratch: Path
    ) -> Mapping[str, FloatArray]:
        """Return the graph values named `values`, [N, K] each, for the N tokens of all texts.

        They stay in files in the directory `scratch`: they may take as much memory as the weights.
        """
        import onnx

        model = onnx.load(graph, load_external_data=False)
        for name in values:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
        widths: dict[str, int] = {}
        for arrays in self._run(model, graph.parent, values):
            for number, (name, array) in enumerate(zip(values, arrays, strict=True)):
                widths[name] = array.shape[-1]
                with (scratch / str(number)).open("ab") as file:
                    file.write(array.data)
        return {
            name: np.memmap(scratch / str(number), np.float32, "r").reshape(-1, widths[name])
            for number, name in enumerate(values)
        }

    def observe_kv_cache(self, graph: Path) -> Iterator[Mapping[str, FloatArray]]:
        """Yield the KV cache of each text by output name, [heads, tokens, size] each.

        The iteration is lazy: the cache of a large model takes a gigabyte per thousand tokens.
        """
        import onnx

        model = onnx.load(graph, load_external_data=False)
        names = [each.name for each in model.graph.output if each.name.startswith("present.")]
        for values in self._run(model, graph.parent, names):
            yield {name: value[0] for name, value in zip(names, values, strict=True)}

    def _run(
        self, model: onnx.ModelProto, directory: Path, outputs: Sequence[str]
    ) -> Iterator[Sequence[FloatArray]]:
        """Yield the outputs for each text. `directory` holds the weights of `model`."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(directory)
        )
        with session_errors():
            session = ort.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        for text in self.texts:
            feeds = _build_feeds(model, text, self.generation_config)
            with session_errors():
                values = session.run(list(outputs), feeds)
            yield values


def _build_feeds(
    model: onnx.ModelProto, text: Tokens, generation_config: GenerationConfig
) -> dict[str, NDArray[np.generic]]:
    """Build the inputs for a prompt, with an empty KV cache that has room for the prompt only."""
    count = len(text)
    caches = (i for i in model.graph.input if i.name.startswith("past_key_values."))
    states = (i for i in model.graph.input if i.name.startswith(PAST_STATES))
    return {
        **{i.name: np.zeros(_read_state_shape(i), np.float32) for i in states},
        **{i.name: _build_cache(i, count, generation_config) for i in caches},
        "input_ids": np.array([text]),
        "attention_mask": np.ones((1, count), np.int64),
        LOGITS_FROM: np.array([count - 1]),
    }


def _build_cache(
    cache: onnx.ValueInfoProto, tokens: int, generation_config: GenerationConfig
) -> FloatArray:
    """Return empty keys or values of a layer. Graphs of the model builder state no head size."""
    _, heads, _, size = (axis.dim_value for axis in cache.type.tensor_type.shape.dim)
    kv_heads, head_dim = generation_config.kv_heads, generation_config.head_dim
    return np.zeros((1, heads or kv_heads, tokens, size or head_dim), np.float32)


def _read_state_shape(state: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Return the shape of a recurrent state of one slot."""
    return (1, *(axis.dim_value for axis in state.type.tensor_type.shape.dim[1:]))
