"""Encoder engine of ONNX Runtime without buckets: it runs each batch in the batch's own shape."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from deployments.config import EncoderSettings
from deployments.engines.base import EngineInfo, GraphSpec, translate_errors
from deployments.engines.forward_pass import Batch, Outputs
from deployments.engines.graph_io import build_feeds, split
from deployments.engines.onnx.memory import ArenaTrimmer, find_shared_trimmer
from deployments.engines.onnx.sessions import CUDA, open_session, output_names, uses_gpu
from deployments.engines.pytorch.capture_lock import find_capture_lock
from deployments.errors import EngineFailed


class OnnxEngine:
    """Encoder engine for one session and any batch shape."""

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self._head, self._mask_token = spec.head, spec.mask_token
        self._lock = find_capture_lock(is_gpu=uses_gpu(spec.options, settings))
        with self._lock.open_model():
            self._session: ort.InferenceSession | None = open_session(spec, settings)
        self._inputs = frozenset(i.name for i in self._session.get_inputs())
        self._outputs = output_names(self._session)
        has_own_arena = CUDA in self._session.get_providers()
        self._arena = ArenaTrimmer(is_gpu=True) if has_own_arena else find_shared_trimmer()
        self.info = EngineInfo(spec.compute_type, self._outputs.tokens is not None)

    def run(self, batch: Batch) -> Outputs:
        session = self._session
        if session is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        feeds = build_feeds(batch, self._inputs, self._mask_token)
        output = self._outputs.select(batch)
        options = self._arena.options(batch.input_ids.size)
        with translate_errors(self.info.compute_type), self._lock.run_pass():
            raw = np.asarray(session.run([output], feeds.arrays, options)[0], dtype=np.float32)
        return Outputs(split(self._head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        with self._lock.run_pass():
            self._session = None
