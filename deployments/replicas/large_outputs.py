"""Limits of the output values that an encoder keeps in memory until it has decoded them."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead
from deployments.errors import InputTooLong
from deployments.messages import TokenizedItem

# Limit of the float32 values in the token vectors of one call: 16 MB, or about 48 MB as JSON.
MAX_TOKEN_VALUES = 1 << 22
# Limit of the vocabulary scores of one call's mask tokens: 512 MB until the call's last pass ends.
# Each mask token has a score per vocabulary entry. Without a limit, the texts of one request could
# need 40 GB.
MAX_MASK_VALUES = 1 << 27
# Limit of the token vector values and vocabulary scores of all calls in the replica.
MAX_OUTPUT_VALUES = 1 << 27


def count_large_values(
    items: Sequence[TokenizedItem], manifest: ArtifactManifest, *, unpooled: bool
) -> int:
    """Count the values of token vectors or mask scores. Other outputs are small and count as 0.

    Raises InputTooLong if these are more than MAX_TOKEN_VALUES or MAX_MASK_VALUES.
    """
    if unpooled:
        tokens = sum(len(item.ids) for item in items)
        width = manifest.token_width or manifest.output_width
        max_tokens = MAX_TOKEN_VALUES // width
        if tokens > max_tokens:
            raise InputTooLong(
                f"`inputs` has {tokens} tokens; the maximum for token vectors is {max_tokens}. "
                "Send fewer or shorter texts.",
                field="inputs",
            )
        return tokens * width
    if manifest.head is ModelHead.MASKS:
        masks = sum(int((item.ids == manifest.mask_token).sum()) for item in items)
        max_masks = MAX_MASK_VALUES // manifest.output_width
        if masks > max_masks:
            raise InputTooLong(
                f"`inputs` has {masks} mask tokens; the maximum is {max_masks}. Send fewer texts.",
                field="inputs",
            )
        return masks * manifest.output_width
    return 0
