"""The parts of the GPU benchmark, in the order of their use for a first look at a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.gpu import decoders, device, encoders, suite
from benchmarks.gpu.cases import Case, Target


@dataclass(frozen=True, slots=True)
class Part:
    """Cases that run in one process, which is ended after `MAX_PART_SECONDS`."""

    title: str
    cases: Callable[[Target], list[Case]]


# s. Machines that are lent end a command after ten minutes.
MAX_PART_SECONDS = 480.0
PARTS: Mapping[str, Part] = {
    "device": Part("the card: matrix rate, bandwidth", device.device_cases),
    "encoder-parity": Part(
        "GPU candidates of every task against fp32 torch", encoders.parity_cases
    ),
    "decoder-parity": Part("GPU candidates of decoders against fp32 torch", decoders.parity_cases),
    "suite": Part("the GPU tests of the suite", suite.suite_cases),
    "encoder-latency": Part(
        "latency of 1 to 64 items of 32 to 512 tokens, MiniLM's shape", encoders.latency_cases
    ),
    "bert-large": Part("BERT-large's shape at 384 tokens", encoders.large_cases),
    "streams": Part("token streams beside transformers", decoders.stream_cases),
    "memory": Part("memory of decoders and the cost of captures", decoders.memory_cases),
}
