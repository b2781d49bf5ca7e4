"""A decoder through ONNX Runtime: graphs in the layout of onnxruntime-genai's model builder.

Their attention (com.microsoft GroupQueryAttention) takes each slot's own length from the sums of
`attention_mask`, and writes what it reads behind what is there. With past and present bound to the
same memory nothing is copied, slots of different lengths decode in one call, and a slot that stands
anywhere in the memory is filled by a call of its own: continuous batching on any provider. On CUDA
the step of each number of slots is captured as one graph, where the provider can.

A graph that keeps int8 has two ways to attend, one for prompts and one for answers. If what the
second gives for several tokens at once is what it gives for one at a time, drafts are verified.

Inputs: input_ids [B, T], attention_mask [B, slots of memory], past_key_values.{layer}.{key,value}
[B, heads, tokens, size], logits_from [1] (from which of the T tokens on logits are wanted),
is_prefill (of a graph that keeps int8: whether the tokens are a prompt's).
Outputs: logits [B, T - logits_from, V], present.{layer}.{key,value}.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.config import HardwareSettings
from deployments.engines.base import translate_errors
from deployments.engines.decoder import (
    IS_PREFILL,
    LOGITS_FROM,
    DecoderInfo,
    DecoderSpec,
    Logits,
    TokenColumn,
)
from deployments.engines.onnx import CUDA, UNCAPTURED, graph_options, open_bare_session
from deployments.engines.onnx_kv_cache import (
    DeviceKvCache,
    HostKvCache,
    KvCacheLayout,
    RowMemory,
    bind_array,
)
from deployments.errors import EngineFailed

log = logging.getLogger("ray.serve.hundredfold")

# More are hardly ever right, and each takes a tenth of a step for one slot; half of one when the
# slot has thousands of tokens.
MAX_DRAFT_TOKENS = 8


class OnnxDecoder:
    """A Decoder over one ONNX Runtime session."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> None:
        context = min(context, spec.max_tokens)
        self.info = DecoderInfo(spec.compute_type, slots, context, spec.vocabulary)
        session, self._captures = self._open(spec, hardware)
        self.layout = KvCacheLayout.of(session, spec, slots, context)
        self._positions = np.arange(context)
        self._session: ort.InferenceSession | None = session
        with translate_errors(spec.path.name):
            self.memory = self._make_memory()
        self._steps: dict[int, _Step] = {}
        self._verifiers: dict[int, _Step] = {}  # by tokens; each for the slot that asked last
        # One for all of them, because logits are long; pages that nobody writes cost nothing.
        self._drafted = self._room_for(1, MAX_DRAFT_TOKENS + 1)
        self.has_prefill_branch = IS_PREFILL in {given.name for given in session.get_inputs()}
        if self.has_prefill_branch and self._verifies_exactly():
            self.info = replace(self.info, max_draft_tokens=MAX_DRAFT_TOKENS)

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        """Read a prompt, or the next part of one. Raises EngineFailed."""
        tokens = len(ids)
        logits = self._room_for(1, tokens if all_logits else 1)
        step = _Step(self, range(slot, slot + 1), tokens, logits, is_prefill=True)
        step.ids[0] = ids
        step.mask[0, : start + tokens] = 1
        found: Logits = self._run(step)[0]
        return found if all_logits else found[0]

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        """One more token for each of the first slots. Raises EngineFailed."""
        slots = len(ids)
        step = self._steps.get(slots)
        if step is None:
            graph = str(slots) if self._captures else UNCAPTURED
            logits = self._room_for(slots, 1)
            step = self._steps[slots] = _Step(self, range(slots), 1, logits, graph=graph)
        step.ids[:, 0] = ids
        np.less_equal(self._positions, lengths[:, None], out=step.mask, casting="unsafe")
        return self._run(step)[:, 0]

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        """Several tokens of an answer. Raises EngineFailed."""
        tokens, slots = len(ids), range(slot, slot + 1)
        step = self._verifiers.get(tokens)
        if step is None or step.slots != slots:
            step = self._verifiers[tokens] = _Step(self, slots, tokens, self._drafted[:, :tokens])
        step.ids[0] = ids
        np.less(self._positions, start + tokens, out=step.mask[0], casting="unsafe")
        found: Logits = self._run(step)[0]
        return found

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the memory of a slot. Raises EngineFailed."""
        with translate_errors(self.info.compute_type):
            self.memory.copy(source, target, tokens)

    def swap(self, first: int, second: int, tokens: int) -> None:
        """Swap the memory of two slots. Raises EngineFailed."""
        with translate_errors(self.info.compute_type):
            self.memory.swap(first, second, tokens)

    def close(self) -> None:
        """Drop the session and the memory."""
        if self._session is not None:
            self._session = None
            self._steps, self._verifiers = {}, {}
            del self.memory

    @property
    def session(self) -> ort.InferenceSession:
        """The session. Raises EngineFailed once it is closed."""
        if self._session is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        return self._session

    def _open(
        self, spec: DecoderSpec, hardware: HardwareSettings
    ) -> tuple[ort.InferenceSession, bool]:
        """The session, and whether a step of each number of slots is captured as a CUDA graph."""
        # With more threads than heads attention splits the context among them, for one slot only and
        # not for several: sums would be rounded in another order, and company would show.
        heads = spec.generation_config.heads or spec.generation_config.kv_heads
        threads = min(hardware.intra_op_threads, heads)
        hardware = hardware.model_copy(update={"intra_op_threads": threads})
        what = (spec.path, spec.options, hardware, spec.precision)
        if CUDA in (spec.options.providers or hardware.providers):
            try:
                return open_bare_session(*what, captured=True), True
            except EngineFailed as exc:  # some operator of it runs on the host
                log.info("%s: steps are not captured: %s", spec.path.name, exc.message)
        return open_bare_session(*what), False

    def _make_memory(self) -> RowMemory:
        if CUDA in self.session.get_providers():
            return DeviceKvCache(self.layout, "cuda", CUDA)
        return HostKvCache(self.layout)

    def _room_for(self, slots: int, tokens: int) -> NDArray[np.generic]:
        """Memory for the logits behind so many tokens of each slot."""
        return np.empty((slots, tokens, self.info.vocabulary), self.layout.answers)

    def _verifies_exactly(self) -> bool:
        """Whether several tokens at once give what they give one by one, to the bit."""
        tokens = np.arange(MAX_DRAFT_TOKENS + 1) % self.info.vocabulary
        if self.info.context < 2 * len(tokens):
            return False
        self.prefill(0, tokens.tolist(), 0)
        places = range(len(tokens), 2 * len(tokens))
        single = [
            self.decode(tokens[i : i + 1], np.array([place]))[0].copy()
            for i, place in enumerate(places)
        ]
        return all(
            np.array_equal(
                self.verify(0, tokens[:count].tolist(), places.start), np.stack(single[:count])
            )
            for count in (2, len(tokens) // 2, len(tokens))
        )

    def _run(self, step: _Step) -> Logits:
        session = self.session
        with translate_errors(self.info.compute_type):
            return step.run(session)


class _Step:
    """One kind of call, bound once: the slots it is about, and memory for what goes in and out."""

    def __init__(
        self,
        decoder: OnnxDecoder,
        slots: range,
        tokens: int,
        logits: NDArray[np.generic],
        *,
        is_prefill: bool = False,
        graph: str = UNCAPTURED,
    ) -> None:
        """`logits`: where those of the last n tokens go, [slots, n, V]."""
        self.slots = slots
        self._binding = decoder.session.io_binding()
        memory = decoder.memory
        self._options = graph_options(graph)
        self.ids = np.zeros((len(slots), tokens), np.int64)
        self.mask = np.zeros((len(slots), decoder.info.context), np.int64)
        self._raw = logits
        self._from = np.array([tokens - logits.shape[1]], np.int64)
        self._is_prefill = np.array(is_prefill)
        self._send = (
            memory.bind_input(self._binding, "input_ids", self.ids),
            memory.bind_input(self._binding, "attention_mask", self.mask),
        )
        # These stay as they are, and are read on the host, whatever the device.
        bind_array(self._binding, self._from, LOGITS_FROM)
        if decoder.has_prefill_branch:
            bind_array(self._binding, self._is_prefill, IS_PREFILL)
        self._receive = memory.bind_output(self._binding, "logits", self._raw)
        memory.bind(self._binding, slots.start, slots.stop)

    def run(self, session: ort.InferenceSession) -> Logits:
        """One call: what it answers, [slots, logits, V]."""
        for send in self._send:
            send()
        session.run_with_iobinding(self._binding, self._options)
        self._receive()
        return self._raw.astype(np.float32, copy=False)
