"""Two baselines of transformers: `generate` with a static cache, and continuous batching."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Target

STATIC, CONTINUOUS = "transformers-static", "transformers-continuous"
_NO_TOKEN = -1  # end-of-sequence id that no token has, so that only the length ends an answer
_PAGE_TOKENS = 256
_TIMEOUT_S = 120.0
_Prompts = Sequence[Sequence[int]]


def generate(
    system: str, weights: Path, target: Target, prompts: _Prompts, new_tokens: int
) -> Mapping[str, Any]:
    """Generate twice in FP16. Time the second run, including its prefill."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        weights, dtype=torch.float16, local_files_only=True, use_safetensors=True
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
    import torch
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=_NO_TOKEN, pad_token_id=1
    )
    manager = model.init_continuous_batching(
        generation_config=settings,
        continuous_batching_config=_limit_pages(target, len(prompts), prompts, new_tokens),
    )
    if hasattr(manager, "warmup"):  # not in older versions of transformers
        # The manager's thread does not run in inference mode. It could not write to tensors that
        # the warm-up creates in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            manager.warmup()
    manager.start()
    try:
        # The first request creates all state that is still missing. Its reversed prompt shares no
        # prefix with the timed prompts.
        _answer(manager, [prompts[0][::-1]], new_tokens)
        started_s = time.perf_counter()
        _answer(manager, prompts, new_tokens)
        return time.perf_counter() - started_s
    finally:
        manager.stop(block=True)


def _answer(manager: Any, prompts: _Prompts, new_tokens: int) -> None:
    """Wait for the answers to all prompts. Raises RuntimeError after an error or a timeout."""
    for _ in manager.add_requests([list(ids) for ids in prompts], max_new_tokens=new_tokens):
        result = manager.get_result(timeout=_TIMEOUT_S)
        if result is None or result.error is not None:
            raise RuntimeError(result.error if result else "no answer in time")


def _limit_pages(target: Target, streams: int, prompts: _Prompts, new_tokens: int) -> Any:
    """Return a configuration whose KV cache has just enough pages for all streams.

    The KV cache has at least 16 pages, or 2 in a dry run. By default, transformers fills the memory
    with pages.
    """
    from transformers import ContinuousBatchingConfig

    known = inspect.signature(ContinuousBatchingConfig).parameters
    pages = -(-(len(prompts[0]) + new_tokens) // _PAGE_TOKENS)
    # `bench gpu` also runs in an environment that was not installed for this project. An older
    # transformers there names the field `block_size`.
    size = "page_size" if "page_size" in known else "block_size"
    return ContinuousBatchingConfig(
        **{size: _PAGE_TOKENS},
        num_blocks=max(target.choose(16, 2), streams * pages),
        max_batch_tokens=max(target.choose(4_096, 64), streams),
    )


GENERATION_BASELINES: Mapping[str, Callable[[Any, Target, _Prompts, int], float]] = {
    STATIC: _run_static,
    CONTINUOUS: _run_continuous,
}
