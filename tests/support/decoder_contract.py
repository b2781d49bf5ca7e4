"""Checks of decoder engines that two test files share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deployments.engines.decoder import DecoderEngine


def check_batch_invariance(
    single: DecoderEngine,
    batched: DecoderEngine,
    prompts: tuple[Sequence[int], Sequence[int]],
    assert_same: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """Decode the first prompt alone and in a batch of three slots. Compare the logits."""
    prompt, other = prompts
    first = single.prefill(0, prompt, 0).copy()
    batched.prefill(0, other, 0)
    np.testing.assert_array_equal(batched.prefill(1, prompt, 0), first)
    for step in range(5):
        token, position = 7 + step, len(prompt) + step
        unbatched = single.decode(np.array([token]), np.array([position]))[0].copy()
        logits = batched.decode(np.array([9, token, 3]), np.array([len(other) + step, position, 0]))
        assert_same(logits[1], unbatched)
