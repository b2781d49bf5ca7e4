"""What a store holds, as values and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.columns import columns
from build_artifacts.decoders.conversations import PERPLEXITY, graph_bytes
from deployments.errors import ArtifactError
from deployments.manifest import ArtifactManifest, Candidate
from deployments.store import LATEST_NAME, VERSION, resolve_version

_HEADER = ("MODEL", "VERSION", "TASKS", "CANDIDATE", "MB", "PARITY", "SOURCE")


@dataclass(frozen=True, slots=True)
class Entry:
    """One version in a store; `manifest` is the reason where it cannot be trusted."""

    id: str
    version: str
    is_latest: bool
    manifest: ArtifactManifest | ArtifactError


def read_store(store: Path) -> list[Entry]:
    """Every version under `store`, by id and version, each file checked against its digest."""
    return list(_entries(store)) if store.is_dir() else []


def _entries(store: Path) -> Iterator[Entry]:
    for model in sorted(path for path in store.iterdir() if path.is_dir()):
        model_id = model.name.replace("--", "/")
        latest = _latest(store, model_id)
        for directory in sorted(p for p in model.iterdir() if VERSION.fullmatch(p.name)):
            manifest: ArtifactManifest | ArtifactError
            try:
                manifest = ArtifactManifest.read(directory)
            except ArtifactError as exc:
                manifest = exc
            yield Entry(model_id, directory.name, directory.name == latest, manifest)


def _latest(store: Path, model_id: str) -> str | None:
    try:
        return resolve_version(store, model_id, LATEST_NAME)
    except ArtifactError:
        return None


def table(entries: Sequence[Entry]) -> str:
    """The entries in columns, one line per candidate graph; `*` marks the latest version."""
    return columns([_HEADER, *(row for entry in entries for row in _rows(entry))])


def _rows(entry: Entry) -> Iterator[tuple[str, ...]]:
    version = f"{entry.version}{' *' if entry.is_latest else ''}"
    manifest = entry.manifest
    if isinstance(manifest, ArtifactError):
        yield entry.id, version, f"damaged ({manifest.code})", "", "", "", manifest.message
        return
    source = manifest.source
    made_of = source.ref + (f" + {source.adapter}" if source.adapter else "")
    first = (entry.id, version, ", ".join(manifest.tasks))
    for candidate in manifest.candidates:
        size = f"{graph_bytes(manifest, candidate) / 1e6:.1f}"
        yield *first, candidate.name, size, _parity(candidate), made_of
        first, made_of = ("", "", ""), ""


def _parity(candidate: Candidate) -> str:
    parity = candidate.parity
    if PERPLEXITY in candidate.scores:
        perplexity = f"perplexity {candidate.scores[PERPLEXITY]:.2f}"
        return f"{perplexity}, next tokens {parity.top1_agreement or 0:.1%}"
    labels = "" if parity.top1_agreement is None else f", labels {parity.top1_agreement:.1%}"
    return f"cosine {parity.cosine_mean:.4f} mean {parity.cosine_worst:.4f} worst{labels}"
