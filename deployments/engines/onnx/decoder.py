"""Decoders through ONNX Runtime: graphs in the layout of onnxruntime-genai's model builder.

The attention operator of these graphs is GroupQueryAttention (com.microsoft). It reads the length
of each slot from the sums of `attention_mask`, and appends the new keys and values to the KV cache.
The past and the present cache are bound to the same memory, so nothing is copied. One call decodes
slots of different lengths. A prefill is a separate call, bound to one slot. Continuous batching
therefore works on any execution provider. On CUDA, the decode step is captured as a CUDA graph,
one for each number of slots. This requires that the provider can run the whole step.

A graph with an int8 KV cache has separate branches for prefill and decode steps. The decoder
verifies draft tokens only if the decode branch gives bitwise equal logits for several tokens in one
call and for single tokens.

Inputs: input_ids [B, T], attention_mask [B, context], past_key_values.{layer}.{key,value}
[B, heads, tokens, size], logits_from [1] (index of the first of the T tokens that gets logits),
is_prefill (only with an int8 KV cache), past_states.{layer}.{name} [B, ...] (only with recurrent
layers; zero before the first token).
Outputs: logits [B, T - logits_from, V], present.{layer}.{key,value}, present_states.{layer}.{name}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.config import HardwareSettings
from deployments.engines.base import translate_errors
from deployments.engines.decoder import (
    IS_PREFILL,
    LOGITS_FROM,
    PAST_STATES,
    PRESENT_STATES,
    DecoderInfo,
    DecoderSpec,
    Logits,
    TokenColumn,
    check_prompt,
)
from deployments.engines.onnx.kv_cache import (
    DeviceKvCache,
    HostKvCache,
    IoBuffer,
    KvCache,
    KvCacheLayout,
    bind_array,
)
from deployments.engines.onnx.sessions import (
    CUDA,
    UNCAPTURED,
    SessionMode,
    graph_options,
    open_bare_session,
    open_captured,
    select_providers,
    uses_gpu,
)
from deployments.engines.pytorch.capture_lock import find_capture_lock
from deployments.engines.recurrent_states import RecurrentStates
from deployments.errors import EngineFailed

# Draft tokens beyond this number are rarely accepted. Verifying one draft token adds a tenth to the
# time of a decode step with one slot. If the slot has thousands of tokens, it adds half.
MAX_DRAFT_TOKENS = 8


# In an fp32 product of matrices, ONNX Runtime adds more than _SPLIT_SUM products in parts, which
# rounds differently, unless the result has at most _UNSPLIT_COLUMNS columns. Attention scores are
# such a product: they add over the channels of a head, and have a column for each token of a slot.
_SPLIT_SUM, _UNSPLIT_COLUMNS = 128, 64


class OnnxDecoder:
    """Decoder engine for one ONNX Runtime session."""

    def __init__(
        self, spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
    ) -> None:
        context = min(context, spec.max_tokens)
        self.info = DecoderInfo(
            spec.compute_type,
            slots,
            context,
            spec.vocabulary,
            min_chunk_end=_find_min_chunk_end(spec.generation_config.head_dim),
        )
        self._lock = find_capture_lock(is_gpu=uses_gpu(spec.options, hardware))
        with self._lock.open_model():
            session, self._captures = self._open(spec, hardware)
            self.layout = KvCacheLayout.of(session, spec, slots, context)
            self._session: ort.InferenceSession | None = session
            with translate_errors(spec.path.name):
                self.kv_cache = self._create_kv_cache()
                # All decode steps share these buffers. Otherwise their memory would grow with the
                # square of the slots, because each number of slots has its own call.
                logits = self._allocate_logits(slots, 1)
                self._decode_buffers = self._create_buffers(slots, 1, logits)
        self.states = _create_states(session, slots)
        self.info = replace(self.info, is_recurrent=bool(self.states))
        self._positions = np.arange(context)
        self._decode_calls: dict[int, _BoundCall] = {}  # by number of slots
        self._verify_calls: dict[int, _BoundCall] = {}  # by number of tokens; each binds one slot
        # All verifications share one array, because logits are large. Pages of the array that no
        # call writes take no memory.
        self._verify_logits = self._allocate_logits(1, MAX_DRAFT_TOKENS + 1)
        self.has_prefill_branch = IS_PREFILL in {given.name for given in session.get_inputs()}
        if self.has_prefill_branch and not self.states and self._verifies_exactly():
            self.info = replace(self.info, max_draft_tokens=MAX_DRAFT_TOKENS)

    def prefill(
        self, slot: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        check_prompt(self.info, ids, start)
        session, tokens = self.session, len(ids)
        with self._lock.run_pass():
            logits_buffer = self._allocate_logits(1, tokens if all_logits else 1)
            buffers = self._create_buffers(1, tokens, logits_buffer)
            call = _BoundCall(self, range(slot, slot + 1), buffers, is_prefill=True)
            self.states.start_prefill(slot, start, tokens)
            call.ids[0] = ids
            call.mask[0, : start + tokens] = 1
            logits: Logits = self._run(session, call)[0]
        return logits if all_logits else logits[0]

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        session, slots = self.session, len(ids)
        call = self._decode_calls.get(slots)
        is_captured = self._captures and call is None  # the first run of a call captures it
        with self._lock.capture() if is_captured else self._lock.run_pass():
            if call is None:
                graph = str(slots) if self._captures else UNCAPTURED
                call = _BoundCall(self, range(slots), self._decode_buffers, graph=graph)
            self.states.start_decode(lengths)
            call.ids[:, 0] = ids
            np.less_equal(self._positions, lengths[:, None], out=call.mask, casting="unsafe")
            logits: Logits = self._run(session, call)[:, 0]
        self._decode_calls[slots] = call
        return logits

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Logits:
        session, tokens, slots = self.session, len(ids), range(slot, slot + 1)
        call = self._verify_calls.get(tokens)
        with self._lock.run_pass():
            if call is None or call.slots != slots:
                buffers = self._create_buffers(1, tokens, self._verify_logits[:, :tokens])
                call = _BoundCall(self, slots, buffers)
                self._verify_calls[tokens] = call
            call.ids[0] = ids
            np.less(self._positions, start + tokens, out=call.mask[0], casting="unsafe")
            logits: Logits = self._run(session, call)[0]
        return logits

    def copy(self, source: int, target: int, tokens: int) -> None:
        with translate_errors(self.info.compute_type), self._lock.run_pass():
            self.kv_cache.copy(source, target, tokens)
            self.states.copy(source, target)

    def swap(self, first: int, second: int, tokens: int) -> None:
        with translate_errors(self.info.compute_type), self._lock.run_pass():
            self.kv_cache.swap(first, second, tokens)
            self.states.swap(first, second)

    def close(self) -> None:
        if self._session is None:
            return
        with self._lock.run_pass():
            self._session = None
            self._decode_calls, self._verify_calls = {}, {}
            del self.kv_cache, self.states, self._decode_buffers

    @property
    def session(self) -> ort.InferenceSession:
        """The open session. Raises EngineFailed once the engine is closed."""
        if self._session is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        return self._session

    def _open(
        self, spec: DecoderSpec, hardware: HardwareSettings
    ) -> tuple[ort.InferenceSession, bool]:
        """Open the session. Return it, and whether decode steps are captured as CUDA graphs."""
        config = spec.generation_config
        # With more threads than heads, attention splits the context of a single slot among threads,
        # but not the contexts of several slots. The order of sums, and so the rounding, would then
        # depend on the batch.
        if config.layers:
            threads = min(hardware.intra_op_threads, config.heads or config.kv_heads)
            hardware = hardware.model_copy(update={"intra_op_threads": threads})

        def open_session(mode: SessionMode) -> ort.InferenceSession:
            return open_bare_session(spec.path, spec.options, hardware, spec.precision, mode=mode)

        if CUDA in select_providers(spec.options, hardware):
            return open_captured(spec.path.name, open_session, "balanced")
        return open_session("balanced"), False

    def _create_kv_cache(self) -> KvCache:
        if CUDA in self.session.get_providers():
            if self.layout.dtype != np.float16:
                # ONNX Runtime would run the attention on the CPU. It would copy the KV cache to the
                # CPU only once, when the cache is bound, so the attention would miss later tokens.
                raise EngineFailed(
                    f"the graph has keys and values of {self.layout.dtype}; ONNX Runtime's "
                    "attention on a GPU needs float16. Build the model again"
                )
            return DeviceKvCache(self.layout, self.session, "cuda", CUDA)
        return HostKvCache(self.layout)

    def _create_buffers(self, slots: int, tokens: int, logits: NDArray[np.generic]) -> _CallBuffers:
        """Create buffers of calls that compute `tokens` tokens of up to `slots` slots."""
        create = self.kv_cache.create_buffer
        return _CallBuffers(
            ids=create(np.zeros((slots, tokens), np.int64)),
            mask=create(np.zeros((slots, self.info.context), np.int64)),
            logits=create(logits),
        )

    def _allocate_logits(self, slots: int, tokens: int) -> NDArray[np.generic]:
        return np.empty((slots, tokens, self.info.vocabulary), self.layout.logits_dtype)

    def _verifies_exactly(self) -> bool:
        """Return whether verification and decode steps give bitwise equal logits here.

        The test calls overwrite slot 0. Return False if the context is too short for them.
        """
        tokens = np.arange(MAX_DRAFT_TOKENS + 1) % self.info.vocabulary
        if self.info.context < 2 * len(tokens):
            return False
        self.prefill(0, tokens.tolist(), 0)
        positions = range(len(tokens), 2 * len(tokens))
        single = [
            self.decode(tokens[i : i + 1], np.array([position]))[0].copy()
            for i, position in enumerate(positions)
        ]
        return all(
            np.array_equal(
                self.verify(0, tokens[:count].tolist(), positions.start), np.stack(single[:count])
            )
            for count in (2, len(tokens) // 2, len(tokens))
        )

    def _run(self, session: ort.InferenceSession, call: _BoundCall) -> Logits:
        with translate_errors(self.info.compute_type):
            return call.run(session)


class _CallBuffers(NamedTuple):
    ids: IoBuffer  # [slots, tokens]
    mask: IoBuffer  # [slots, context]
    logits: IoBuffer  # [slots, n, V]: of the last n of the tokens


class _BoundCall:
    """A call with bound slots, inputs and outputs, which can run many times."""

    def __init__(
        self,
        decoder: OnnxDecoder,
        slots: range,
        buffers: _CallBuffers,
        *,
        is_prefill: bool = False,
        graph: str = UNCAPTURED,
    ) -> None:
        """Bind the call to the first rows of the buffers, one for each slot."""
        self.slots = slots
        self._buffers = buffers  # kept: on a device, the bound views do not own their memory
        rows = len(slots)
        self._binding = decoder.session.io_binding()
        kv_cache = decoder.kv_cache
        self._options = graph_options(graph)
        self.ids, self.mask = buffers.ids.values[:rows], buffers.mask.values[:rows]
        logits_from = self.ids.shape[1] - buffers.logits.values.shape[1]
        self._logits_from = np.array([logits_from], np.int64)
        self._is_prefill = np.array(is_prefill)
        self._send = (
            buffers.ids.bind_input(self._binding, "input_ids", rows),
            buffers.mask.bind_input(self._binding, "attention_mask", rows),
        )
        # ONNX Runtime reads the next two inputs from host memory, even on a GPU. They are constant.
        bind_array(self._binding, self._logits_from, LOGITS_FROM)
        if decoder.has_prefill_branch:
            bind_array(self._binding, self._is_prefill, IS_PREFILL)
        self._receive = buffers.logits.bind_output(self._binding, "logits", rows)
        kv_cache.bind(self._binding, slots.start, slots.stop)
        for name, array in decoder.states.views(slots.start, slots.stop).items():  # in place
            bind_array(self._binding, array, f"{PAST_STATES}{name}", f"{PRESENT_STATES}{name}")

    def run(self, session: ort.InferenceSession) -> Logits:
        """Run the call. Return logits [slots, n, V]."""
        for send in self._send:
            send()
        session.run_with_iobinding(self._binding, self._options)
        return self._receive().astype(np.float32, copy=False)


def _create_states(session: ort.InferenceSession, slots: int) -> RecurrentStates:
    """Allocate the recurrent states of a graph in fp32, in host memory."""
    shapes = {
        state.name.removeprefix(PAST_STATES): (slots, *state.shape[1:])
        for state in session.get_inputs()
        if state.name.startswith(PAST_STATES)
    }
    current, resumable = (
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()} for _ in range(2)
    )
    return RecurrentStates(current, resumable, slots)


def _find_min_chunk_end(head_dim: int) -> int:
    """Return the smallest number of tokens at whose end a chunk rounds as a longer one does."""
    return 1 + _UNSPLIT_COLUMNS if head_dim > _SPLIT_SUM else 0
