"""Limits of the output values that an encoder keeps in memory until it has decoded them."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead
from deployments.errors import InputTooLong
from deployments.messages import TokenizedItem

# Limit of the float32 values in the token vectors of one call: 16 MB, or about 48 MB as JSON.
MAX_TOKEN_VALUES = 1 << 22
# Limit of the vocabulary scores of one call: 512 MB until the call's last pass ends. Each mask
# token, or each text of a sparse encoder, has a score per vocabulary entry. Without a limit, the
# texts of one request could need 40 GB.
MAX_VOCABULARY_VALUES = 1 << 27
# Limit of the token vector values and vocabulary scores of all calls in the replica.
MAX_OUTPUT_VALUES = 1 << 27


def limit_call_texts(manifest: ArtifactManifest) -> int | None:
    """Return the maximum of texts in one call; None: no limit.

    For a fill-mask model it is the maximum of mask tokens, of which each text has one or more.
    """
    if manifest.head in (ModelHead.MASKS, ModelHead.SPARSE):
        return MAX_VOCABULARY_VALUES // manifest.output_width
    return None


def count_large_values(
    items: Sequence[TokenizedItem], manifest: ArtifactManifest, *, unpooled: bool
) -> int:
    """Count the values of token vectors or vocabulary scores. Other outputs are small: 0.

    Raises InputTooLong if these are more than MAX_TOKEN_VALUES or MAX_VOCABULARY_VALUES.
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
    max_rows = limit_call_texts(manifest)
    if max_rows is None:
        return 0
    rows, named = len(items), "texts"
    if manifest.head is ModelHead.MASKS:
        rows = sum(int((item.ids == manifest.mask_token).sum()) for item in items)
        named = "mask tokens"
    if rows > max_rows:
        raise InputTooLong(
            f"`inputs` has {rows} {named}; the maximum is {max_rows}. Send fewer texts.",
            field="inputs",
        )
    return rows * manifest.output_width
