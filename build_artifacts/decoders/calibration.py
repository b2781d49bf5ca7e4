"""What a decoder's products read, and what it keeps: values of a few hundred tokens, in floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.decoders.float_graph import FloatArray
from build_artifacts.decoders.gate_inputs import Tokens
from deployments.artifacts.generation_config import GenerationConfig
from deployments.engines.decoder import LOGITS_FROM

if TYPE_CHECKING:
    import onnx


class CalibrationTexts(NamedTuple):
    """Texts that a graph without an encoder reads, so that its values are seen."""

    texts: Sequence[Tokens]
    generation_config: GenerationConfig

    def observe(self, graph: Path, values: Sequence[str]) -> Mapping[str, FloatArray]:
        """The named values of a float graph for the tokens of all texts, [N, K]."""
        import onnx

        model = onnx.load(graph, load_external_data=False)
        for name in values:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
        seen = zip(*self._run(model, graph.parent, values), strict=True)
        return {
            name: np.concatenate([each.reshape(-1, each.shape[-1]) for each in of_texts])
            for name, of_texts in zip(values, seen, strict=True)
        }

    def observe_kv_cache(self, graph: Path) -> Iterator[Mapping[str, FloatArray]]:
        """What a float graph keeps of each text, by output: [heads, tokens, size].

        One text after the other: of a large model it is a gigabyte for a thousand tokens.
        """
        import onnx

        model = onnx.load(graph, load_external_data=False)
        names = [each.name for each in model.graph.output if each.name.startswith("present.")]
        for values in self._run(model, graph.parent, names):
            yield {name: value[0] for name, value in zip(names, values, strict=True)}

    def _run(
        self, model: onnx.ModelProto, directory: Path, outputs: Sequence[str]
    ) -> Iterator[Sequence[FloatArray]]:
        """The outputs for each text; the weights lie in `directory`."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(directory)
        )
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        for text in self.texts:
            yield session.run(list(outputs), _build_feeds(model, text, self.generation_config))


def _build_feeds(
    model: onnx.ModelProto, text: Tokens, generation_config: GenerationConfig
) -> dict[str, NDArray[np.generic]]:
    """A prompt into a memory of its own length, which holds nothing yet."""
    count = len(text)
    memory = np.zeros(
        (1, generation_config.kv_heads, count, generation_config.head_dim), np.float32
    )
    return {
        **{i.name: memory for i in model.graph.input if i.name.startswith("past_key_values.")},
        "input_ids": np.array([text]),
        "attention_mask": np.ones((1, count), np.int64),
        LOGITS_FROM: np.array([count - 1]),
    }
