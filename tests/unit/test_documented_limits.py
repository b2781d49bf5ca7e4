"""Fixed limits have the numbers that documents state.

Other tests compare behavior with the constants. Here a change of a constant without its document
fails, and the reverse.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cluster.edge.haproxy_config import ClientLimits
from deployments.generation import grammar_trials

DOCS = Path(__file__).parents[2] / "docs"

# The constant, its value, and the words of the document.
LIMITS = {
    "apis.md": [
        ("deployments.ingress.builds.FAILED_FOR_S", 600, "start it again after ten minutes"),
        ("deployments.ingress.builds.EVENT_S", 1, "as an event, at most each second"),
        ("deployments.ingress.builds.MAX_WATCH_S", 100, "until the build has ended or 100 s"),
        ("deployments.ingress.apis.shared.model_list.MAX_PAGE_MODELS", 1000, "in pages of 1,000,"),
        ("deployments.ingress.client_identity.MIN_KEY_CHARS", 16, "has at least 16 characters"),
        ("deployments.tasks.sparse_embeddings.MAX_WEIGHTS", 1_048_576, "at most 1,048,576 weights"),
        (
            "deployments.large_outputs.MAX_VOCABULARY_VALUES",
            134_217_728,
            "more than 134,217,728 vocabulary entries",
        ),
        ("deployments.large_outputs.MAX_TOKEN_VALUES", 1 << 22, "at most 4 million numbers"),
        ("deployments.tokenization.windows.MAX_WINDOWS", 1024, "at most 1,024 per text"),
        ("deployments.tokenization.tokenizer.MAX_CALL_WINDOWS", 4096, "and 4,096 per request"),
        ("deployments.tasks.question_answering._QUESTION_TOKENS", 64, "is cut at 64 tokens"),
        (
            "deployments.ingress.apis.openai.tool_calls.MAX_PREFIX_CHARS",
            1000,
            "in at most 1,000 characters",
        ),
        ("deployments.ingress.apis.openai.schemas.MAX_TOOLS", 1024, "may have 1,024 tools"),
        ("deployments.generation.grammar.MAX_CHARACTERS", 65_536, "(65,536 characters)"),
        ("deployments.ingress.http.sse.KEEP_ALIVE_S", 30, "waits longer than 30 s"),
        (
            "deployments.ingress.apis.operations.live_statistics.WINDOW_S",
            60,
            "has the requests of the last minute",
        ),
        ("deployments.ingress.http.bodies.MAX_DEPTH", 32, "at most 32 levels"),
        ("deployments.ingress.http.bodies.MAX_CONTAINERS", 20_000, "20,000 objects and lists"),
    ],
    "generation.md": [
        ("deployments.generation.prefill.MAX_IDLE_PREFILL_S", 2, "at most about 2 s while none"),
        ("deployments.generation.prefill.LAST_CHUNK_TOKENS", 16, "about 16 tokens before"),
        ("deployments.generation.kv_slots.MIN_SHARED_TOKENS", 64, "the same 64 tokens or more"),
        (
            "deployments.generation.chat_template.MAX_SOURCE_CHARACTERS",
            100_000,
            "at most 100,000 characters",
        ),
        ("deployments.generation.chat_template.MAX_CPU_S", 2, "CPU time (2 s,"),
    ],
    "operations.md": [
        ("deployments.replicas.pool_memory.ARENA_BYTES_PER_PASS", 40e6, "Encoders count 40 MB per"),
        ("deployments.host.gpus.MIN_DRIVER_SERIES", 580, "of the 580 series or later"),
        ("deployments.host.gpus.MIN_COMPUTE_CAPABILITY", (7, 5), "at least 7.5"),
        ("deployments.ingress.request_log.MAX_LINES_PER_S", 20, "at most 20 lines a second"),
        ("deployments.ingress.request_log.SLOW_REQUEST_S", 1, "took longer than a second"),
        ("deployments.ingress.devices.cluster_state.MAX_AGE_S", 30, "is older than 30 s"),
        ("deployments.ingress.http.tracing.FLUSH_TIMEOUT_S", 3, "the last spans for at most 3 s"),
        ("cluster.launcher.ray_sessions.KEPT_SESSIONS", 5, "except the last five"),
        ("cluster.launcher.ray_host.MAX_STARTS", 3, "does not start three times in a row"),
        ("cluster.processes.SERVE_STOP_S", 5, "lets running requests finish for 5 s"),
    ],
}
ROWS = [(document, *row) for document, rows in LIMITS.items() for row in rows]


def read_words(document: str) -> str:
    """Return the text of a document without its line breaks."""
    return " ".join((DOCS / document).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("document", "name", "value", "words"), ROWS, ids=[r[1] for r in ROWS])
def test_fixed_limit_is_that_of_the_document(
    document: str, name: str, value: Any, words: str
) -> None:
    module, _, constant = name.rpartition(".")
    assert getattr(import_module(module), constant) == value
    assert words in read_words(document)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("head_s", 10, "The head of a request must arrive within 10 s"),
        ("body_s", 20, "its first 15 KB within 20 s"),
        ("connections", 2048, "one address may hold 2,048 connections"),
        ("requests", 512, "more than 512 POST requests in flight"),
    ],
)
def test_limit_of_haproxy_is_that_of_the_document(field: str, value: int, words: str) -> None:
    assert getattr(ClientLimits(), field) == value
    assert words in read_words("operations.md")


def test_limits_of_a_grammar_are_those_of_the_document() -> None:
    full = grammar_trials.FULL
    assert (full.cpu_s, full.memory_bytes) == (1, 128 << 20)
    assert "within 1 s and 128 MB of memory each" in read_words("generation.md")
