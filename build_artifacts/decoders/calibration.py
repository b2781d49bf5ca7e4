"""What a decoder's products read, and what it keeps: values of a few hundred tokens, in floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.decoders.asked import Tokens
from build_artifacts.decoders.float_graph import Floats
from deployments.decoding import Decoding
from deployments.engines.decoder import LOGITS_FROM

if TYPE_CHECKING:
    import onnx


class Calibration(NamedTuple):
    """Texts that a graph without an encoder reads, so that its values are seen."""

    texts: Sequence[Tokens]
    decoding: Decoding

    def observe(self, graph: Path, values: Sequence[str]) -> Mapping[str, Floats]:
        """The named values of a float graph for the tokens of all texts, [N, K]."""
        import onnx

        model = onnx.load(graph, load_external_data=False)
        for name in values:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
        return {
            name: np.concatenate([each.reshape(-1, each.shape[-1]) for each in seen])
            for name, seen in self._run(model, graph.parent, values).items()
        }

    def kept(self, graph: Path) -> Mapping[str, Floats]:
        """What a graph keeps of the tokens of all texts, by output: [N, heads, size]."""
        import onnx

        model = onnx.load(graph, load_external_data=False)
        names = [each.name for each in model.graph.output if each.name.startswith("present.")]
        return {
            name: np.concatenate([each[0].swapaxes(0, 1) for each in seen])
            for name, seen in self._run(model, graph.parent, names).items()
        }

    def _run(
        self, model: onnx.ModelProto, directory: Path, outputs: Sequence[str]
    ) -> Mapping[str, Sequence[Floats]]:
        """The outputs of each text; the weights lie in `directory`."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(directory)
        )
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        seen = [
            session.run(list(outputs), _feeds(model, text, self.decoding)) for text in self.texts
        ]
        return dict(zip(outputs, zip(*seen, strict=True), strict=True))


def _feeds(
    model: onnx.ModelProto, text: Tokens, decoding: Decoding
) -> dict[str, NDArray[np.generic]]:
    """A prompt into a memory of its own length, which holds nothing yet."""
    count = len(text)
    memory = np.zeros((1, decoding.kv_heads, count, decoding.head_dim), np.float32)
    return {
        **{i.name: memory for i in model.graph.input if i.name.startswith("past_key_values.")},
        "input_ids": np.array([text]),
        "attention_mask": np.ones((1, count), np.int64),
        LOGITS_FROM: np.array([count - 1]),
    }
