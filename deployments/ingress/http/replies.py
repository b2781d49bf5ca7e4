"""What every family tells about an answer, or a failure, in headers."""

from __future__ import annotations

from deployments.errors import ServeError
from deployments.ingress.service import Reply


def reply_headers(reply: Reply) -> dict[str, str]:
    """What the hosted API told in headers (seconds), and where the time went (milliseconds)."""
    timings = reply.answer.timings
    headers = {
        "x-compute-type": reply.answer.compute_type,
        "x-compute-time": f"{reply.total_s:.4f}",
        "x-compute-characters": str(reply.characters),
        "x-compute-tokens": str(timings.tokens),
        "x-cache": "hit" if reply.kept else "miss",
        "x-sha": reply.model.manifest.source.revision,
        "server-timing": (
            f"encode;dur={timings.encode_s * 1e3:.2f}, queue;dur={timings.queue_s * 1e3:.2f}, "
            f"forward;dur={timings.forward_s * 1e3:.2f}, total;dur={reply.total_s * 1e3:.2f}"
        ),
    }
    if reply.answer.truncated:
        cut = f"{reply.answer.truncated} of {reply.items} texts"
        limit = reply.model.manifest.max_tokens
        headers["x-hf-warning"] = f"input-truncated; {cut} cut to {limit} tokens"
    return headers


def retry_headers(error: ServeError) -> dict[str, str]:
    """`Retry-After` in whole seconds, where trying again makes sense."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, round(error.retry_after_s)))}
