"""Two baselines of transformers: `generate` with a static cache, and continuous batching."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.continuous_batching import ContinuousBatching
from benchmarks.gpu.cases import Target
from deployments.artifacts.types import Dtype

STATIC, CONTINUOUS = "transformers-static", "transformers-continuous"
_Prompts = Sequence[Sequence[int]]


def generate(
    system: str, weights: Path, dtype: Dtype, target: Target, prompts: _Prompts, new_tokens: int
) -> Mapping[str, Any]:
    """Generate twice. Time the second run, including its prefill."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        weights, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
    )
    model = model.eval().to(target.device)
    run = GENERATION_BASELINES[system]
    with torch.inference_mode():
        for _ in range(2):
            elapsed_s = run(model, target, prompts, new_tokens)
    return {"total_tokens_per_s": len(prompts) * new_tokens / elapsed_s, "seconds": elapsed_s}


def _run_static(model: Any, target: Target, prompts: _Prompts, new_tokens: int) -> float:
    import torch

    ids = torch.tensor(prompts, device=target.device)
    started_s = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        cache_implementation="static",  # transformers compiles steps with a static cache on a GPU
        pad_token_id=1,
    )
    target.synchronize()
    return time.perf_counter() - started_s


def _run_continuous(model: Any, target: Target, prompts: _Prompts, new_tokens: int) -> float:
    """Time the answers. Exclude the start of the manager: KV cache, graph captures and thread."""
    streams = len(prompts)
    batching = ContinuousBatching(
        model,
        streams=streams,
        context=len(prompts[0]) + new_tokens,
        max_batch_tokens=max(target.choose(4_096, 64), streams),
        min_pages=target.choose(16, 2),
    )
    try:
        # The first request creates all state that is still missing. Its reversed prompt shares no
        # prefix with the timed prompts.
        batching.answer([prompts[0][::-1]], new_tokens)
        started_s = time.perf_counter()
        batching.answer(prompts, new_tokens)
        return time.perf_counter() - started_s
    finally:
        batching.close()


GENERATION_BASELINES: Mapping[str, Callable[[Any, Target, _Prompts, int], float]] = {
    STATIC: _run_static,
    CONTINUOUS: _run_continuous,
}
