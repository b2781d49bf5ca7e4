"""A server with GPU replicas: its answers unbatched, batched and on the CPU, and its throughput."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client, ServerAddress, model_path
from benchmarks.common.random_checkpoints import (
    MINILM,
    SMALL_LLAMA,
    TINY_BERT,
    write_bert,
    write_llama,
)
from benchmarks.common.report import REPOSITORY
from benchmarks.common.statistics import percentiles_ms
from benchmarks.gpu.cases import Bench, Case, Target
from benchmarks.gpu.checkpoints import find_smollm
from build_artifacts.presets import DECODER_FP16, DECODER_INT8, DECODER_INT8_BLOCKS, GPU_FP16, QUICK
from build_artifacts.recipes import CPU_FP32
from deployments.artifacts.store import LATEST_NAME
from deployments.artifacts.types import Device, TaskName
from deployments.tuning.parity import cosines

ENCODER, GENERATOR, SMOLLM = "gpu/encoder", "gpu/generator", "gpu/smollm2"
_TEXTS, _NEW_TOKENS = 32, 32
_CONNECTIONS = {ENCODER: (1, 64, 256), GENERATOR: (1, 32), SMOLLM: (1, 32)}
_MIN_COSINE = 0.999
# Minimum share of generated texts that are equal with and without batching. Matrix products over
# different numbers of slots round differently, so the order of two tokens with nearly equal logits
# may change.
_MIN_SAME_ANSWERS = 0.9
_START_S = 120.0  # time limit for a GPU replica, which starts at the first request


class _ModelCall(NamedTuple):
    model: str
    parameters: Mapping[str, Any]

    def body(self, text: str, device: Device) -> bytes:
        options = {"use_cache": False, "wait_for_model": True}
        if device is Device.GPU:
            options |= {"use_gpu": True, "require_gpu": True}
        return orjson.dumps({"inputs": text, "parameters": self.parameters, "options": options})


_EMBED = _ModelCall(ENCODER, {})
_GENERATE = _ModelCall(
    GENERATOR,
    {"max_new_tokens": _NEW_TOKENS, "do_sample": False, "return_full_text": False},
)


def server_cases(_target: Target) -> list[Case]:
    return [Case("answers", _compare_answers), Case("throughput", _measure_throughput)]


def _compare_answers(bench: Bench) -> Mapping[str, Any]:
    with serve_models(bench, (ENCODER, GENERATOR)) as address:
        return compare_answers(address, bench.target.seed)


def _measure_throughput(bench: Bench) -> Mapping[str, Any]:
    import httptools  # noqa: F401  the load generator needs it; without it the case is blocked

    with serve_models(bench, (ENCODER, _fast_generator(bench.target))) as address:
        return measure_throughput(address, bench.target)


def _fast_generator(target: Target) -> str:
    """Return the generator whose throughput is measured.

    A dry run uses GENERATOR, which the case `answers` also needs, to save the build of a model.
    """
    return target.choose(SMOLLM, GENERATOR)


@contextmanager
def serve_models(bench: Bench, models: Sequence[str]) -> Iterator[ServerAddress]:
    """Build models into one store and run a server on it. Yield its address."""
    import ray  # noqa: F401  a server needs it; without it the case is blocked

    from benchmarks.common.serve_config import ServeConfig
    from benchmarks.servers.own_server import build_serve_command
    from benchmarks.servers.processes import run_server

    store = bench.once("server/store", lambda root: root)
    for model in models:
        bench.once(f"server/{model}", partial(_build_model, bench, model, store))
    directory = bench.scratch / f"server-{time.monotonic_ns()}"
    # A dry run declares a GPU to Ray, so that GPU replicas start. They run on the CPU.
    options = () if bench.target.is_cuda else ("--num-gpus", "1")
    config = ServeConfig.read()
    if not bench.target.is_cuda:
        for kind in ("encoders", "generators"):
            config.arguments[kind]["gpu"]["providers"] = ["CPUExecutionProvider"]
    config.select_models(store, dict.fromkeys(models, LATEST_NAME))
    directory.mkdir()
    command = build_serve_command(config.write(directory), *options)
    with run_server(command, directory, REPOSITORY) as server:
        yield server.address


def _build_model(bench: Bench, model: str, store: Path, root: Path) -> None:
    from build_artifacts.build_devices import fit_to_host
    from build_artifacts.families.base import BuildBudget
    from build_artifacts.pipeline import BuildRequest, build
    from build_artifacts.progress import BuildProgress

    target = bench.target
    checkpoint = root / "checkpoint"
    checkpoint.mkdir()
    if model == ENCODER:
        sizes = target.choose(MINILM, TINY_BERT)
        write_bert(checkpoint, sizes, TaskName.FEATURE_EXTRACTION, target.seed)
    elif model == SMOLLM:
        checkpoint = find_smollm(bench)
    else:
        write_llama(checkpoint, SMALL_LLAMA, target.seed)
    # A dry run opens the GPU candidates on the CPU, so it builds only one candidate per device.
    dry = replace(QUICK, candidates=(CPU_FP32, GPU_FP16), decoders=(DECODER_INT8, DECODER_FP16))
    recipe = target.choose(fit_to_host(QUICK), dry)
    if model == SMOLLM:  # its CPU candidate is not measured, so the build takes a fast one
        recipe = replace(recipe, decoders=(DECODER_INT8_BLOCKS, DECODER_FP16))
    request = BuildRequest(
        ref=str(checkpoint),
        store=store,
        id=model,
        task=TaskName.FEATURE_EXTRACTION if model == ENCODER else None,
        recipe=recipe,
        budget=BuildBudget(tune_seconds=0.0),
    )
    build(request, BuildProgress(io.StringIO()))


def compare_answers(address: ServerAddress, seed: int) -> Mapping[str, Any]:
    """Send texts to the GPU, one after the other and all at once, then to the CPU.

    Raises BenchmarkError if a GPU replica does not start, or if the wrong device answers.
    """
    texts = _draw_texts(seed)
    alone, batched, cpu = (_to_vectors(round_) for round_ in _ask(address, _EMBED, texts))
    batched_cosines, cpu_cosines = cosines(alone, batched), cosines(alone, cpu)
    texts_alone, texts_batched, texts_cpu = _ask(address, _GENERATE, texts)
    same_batched, same_on_cpu = (
        float(np.mean([one == other for one, other in zip(texts_alone, others, strict=True)]))
        for others in (texts_batched, texts_cpu)
    )
    reasons = []
    if batched_cosines.min() < _MIN_COSINE:
        reasons.append(f"an embedding changes in a batch: cosine {batched_cosines.min():.4f}")
    if same_batched < _MIN_SAME_ANSWERS:
        reasons.append(f"only {same_batched:.0%} of the answers stay the same in a batch")
    return {
        "texts": len(texts),
        "batched_cosine_worst": float(batched_cosines.min()),
        "cpu_cosine_worst": float(cpu_cosines.min()),
        "same_answers_batched": same_batched,
        "same_answers_on_cpu": same_on_cpu,
        "reasons": reasons,
    }


def measure_throughput(address: ServerAddress, target: Target) -> Mapping[str, Any]:
    """Measure requests/s of embeddings on both devices, and tokens/s of answers on the GPU.

    Each connection sends the next request when it has the answer to the last one. Failed requests
    become `reasons`.
    """
    # Needs httptools, which a machine with only torch and transformers may lack.
    from benchmarks.serving.load import LoadPlan, Workload, run_load

    texts = _draw_texts(target.seed)
    new_tokens = target.choose(128, 8)
    answer = _ModelCall(
        _fast_generator(target),
        {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False},
    )
    rows: list[Mapping[str, Any]] = []
    reasons: list[str] = []
    for call, device, unit, count in (
        (_EMBED, Device.CPU, "embeddings", 1),
        (_EMBED, Device.GPU, "embeddings", 1),
        (answer, Device.GPU, "tokens", new_tokens),
    ):
        _wait_until_answered(partial(_send, address, call, texts[0], device))
        requests = [
            address.build_post(model_path(call.model), call.body(text, device)) for text in texts
        ]
        for connections in _CONNECTIONS[call.model]:
            plan = LoadPlan(
                connections=connections,
                seconds=target.choose(5.0, 4.0),  # slow hosts need seconds for one answer
                warm_up_s=target.choose(1.5, 0.5),
            )
            load = asyncio.run(run_load(address, Workload(requests), plan))
            reasons += [
                f"{n} times {reason} on the {device}" for reason, n in load.failures.items()
            ]
            rows.append(
                {
                    "model": call.model,
                    "device": str(device),
                    "connections": connections,
                    f"{unit}_per_s": load.requests_per_s * count,
                    **percentiles_ms(load.latencies_s),
                }
            )
    return {"rows": rows, "reasons": reasons}


def _ask(address: ServerAddress, call: _ModelCall, texts: Sequence[str]) -> list[list[Any]]:
    """Return three lists of answers to all texts: GPU unbatched, GPU batched, and CPU."""
    send = partial(_send, address, call)
    _wait_until_answered(lambda: send(texts[0], Device.GPU))
    alone = [send(text, Device.GPU) for text in texts]
    with ThreadPoolExecutor(len(texts)) as threads:
        batched = list(threads.map(lambda text: send(text, Device.GPU), texts))
    return [alone, batched, [send(text, Device.CPU) for text in texts]]


def _send(address: ServerAddress, call: _ModelCall, text: str, device: Device) -> Any:
    """Return the answer of `device`. Raises BenchmarkError if another device answers."""
    with Client(address) as client:
        answer = client.post(model_path(call.model), call.body(text, device))
    if not (answer.compute_type or "").startswith(str(device)):
        raise BenchmarkError(
            f"`{answer.compute_type}` answered a request for the {device}",
            hint="`hundredfold doctor` says what uses the GPU",
        )
    return answer.value


def _wait_until_answered(send: Callable[[], object]) -> None:
    """Repeat a request until a GPU replica has started. Raises the last error after _START_S."""
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            send()
        except BenchmarkError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(1.0)
        else:
            return


def _draw_texts(seed: int) -> list[str]:
    """Return texts of about 20 to 300 characters, which fit into the contexts of both models."""
    from build_artifacts.encoders.probes import PROBES

    rng = np.random.default_rng(seed)
    probes = [probe for probe in PROBES if probe.strip()]  # the server refuses empty texts
    lengths = rng.integers(20, 300, _TEXTS).tolist()
    return [" ".join(rng.permutation(probes))[:length].strip() for length in lengths]


def _to_vectors(answers: Sequence[Any]) -> list[NDArray[np.float32]]:
    return [np.ravel(np.asarray(answer, dtype=np.float32)) for answer in answers]
