"""Continuous batching of transformers with a paged KV cache, a baseline of two benchmarks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from benchmarks.common.errors import BenchmarkError

PAGE_TOKENS = 256  # tokens per page of the KV cache
TIMEOUT_S = 120.0
NO_TOKEN = -1  # end-of-sequence id that no token has, so that only the length ends an answer


class ContinuousBatching:
    """The batching manager of transformers for one model, which runs in a thread of its own.

    The KV cache has pages for `streams` streams of `context` tokens, and at least `min_pages`.
    Without this limit, transformers fills most of the memory with pages and attention masks.
    """

    def __init__(
        self,
        model: Any,
        *,
        streams: int,
        context: int,
        max_batch_tokens: int,
        min_pages: int = 1,
    ) -> None:
        """Start the manager. Raises BenchmarkError if transformers has no continuous batching."""
        import torch
        import transformers

        pages = max(min_pages, streams * -(-context // PAGE_TOKENS))
        settings = transformers.GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN)
        self._manager = model.init_continuous_batching(
            generation_config=settings,
            continuous_batching_config=_limit_pages(transformers, pages, max_batch_tokens),
        )
        if hasattr(self._manager, "warmup"):  # not in older versions of transformers
            # The manager's thread does not run in inference mode. It could not write to tensors
            # that the warm-up creates in inference mode.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._manager.warmup()
        self._manager.start()

    def answer(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, *, record_times: bool = False
    ) -> list[Any]:
        """Return the results of transformers, in the order of `prompts`.

        With `record_times`, the results hold the times of their tokens. Raises RuntimeError after
        an error or a timeout.
        """
        results: dict[str, Any] = {}
        request_ids = self._manager.add_requests(
            [list(ids) for ids in prompts],
            max_new_tokens=new_tokens,
            **({"record_timestamps": True} if record_times else {}),
        )
        while len(results) < len(request_ids):
            result = self._manager.get_result(timeout=TIMEOUT_S)
            if result is None or result.error is not None:
                raise RuntimeError(result.error if result else "no answer in time")
            results[result.request_id] = result
        return [results[request_id] for request_id in request_ids]

    def close(self) -> None:
        self._manager.stop(block=True)


def _limit_pages(transformers: Any, pages: int, max_batch_tokens: int) -> Any:
    config = getattr(transformers, "ContinuousBatchingConfig", None)
    if config is None:
        raise BenchmarkError(
            f"transformers {transformers.__version__} has no ContinuousBatchingConfig",
            hint="install a later version of transformers",
        )
    # `bench gpu` also runs in an environment that was not installed for this project. An older
    # transformers there names the field `block_size`.
    known = inspect.signature(config).parameters
    size = "page_size" if "page_size" in known else "block_size"
    return config(**{size: PAGE_TOKENS}, num_blocks=pages, max_batch_tokens=max_batch_tokens)
