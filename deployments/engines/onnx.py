"""ONNX Runtime, on whichever execution providers the settings name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime as ort

from deployments.engines.base import EngineInfo
from deployments.errors import EngineFailed
from deployments.messages import Batch, Outputs


class OnnxEngine:
    """An Engine over one ONNX Runtime session.

    Inputs `input_ids`, `attention_mask` and, where the graph has it, `token_type_ids` are int64
    [B, T]; the first output is [B, W].
    """

    def __init__(
        self,
        graph: Path,
        info: EngineInfo,
        *,
        providers: tuple[str, ...] = ("CPUExecutionProvider",),
        threads: int = 1,
        disabled_optimizers: tuple[str, ...] = (),
    ) -> None:
        self.info = info
        with ort_errors(graph.name):
            self._session: ort.InferenceSession | None = ort.InferenceSession(
                graph,
                sess_options=_session_options(threads),
                providers=list(providers),
                disabled_optimizers=list(disabled_optimizers) or None,
            )
            self._inputs = frozenset(i.name for i in self._session.get_inputs())

    def run(self, batch: Batch) -> Outputs:
        """One forward pass. Raises EngineFailed."""
        if self._session is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        feeds = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if "token_type_ids" in self._inputs:
            feeds["token_type_ids"] = np.zeros_like(batch.input_ids)
        with ort_errors(self.info.compute_type):
            rows = np.asarray(self._session.run(None, feeds)[0], dtype=np.float32)
        return Outputs(rows)

    def close(self) -> None:
        """Drop the session and its memory."""
        self._session = None


def check_providers(providers: tuple[str, ...]) -> None:
    """Raise EngineFailed unless this build of ONNX Runtime has them all."""
    for provider in providers:
        if provider not in ort.get_available_providers():
            raise EngineFailed(f"onnxruntime has no `{provider}` here")


def _session_options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # Idle engine threads must not burn the cores that tokenizers and ingress need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # The arena keeps the largest shape ever seen, per thread: 80 MB more for MiniLM, and no
    # faster (docs/performance.md). Without it memory stays flat whatever the lengths.
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 3
    return options


@contextmanager
def ort_errors(engine: str) -> Iterator[None]:
    """Give ONNX Runtime's failures our name; the original stays as the cause.

    Its Python exceptions share no base class of their own but all derive from Exception
    directly (onnxruntime.capi.onnxruntime_pybind11_state), RuntimeError or ValueError.
    """
    try:
        yield
    except EngineFailed:
        raise
    except Exception as exc:
        raise EngineFailed(f"{engine}: {exc}") from exc
