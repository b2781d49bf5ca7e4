"""SOURCE is a model id on a Hugging Face hub, optionally `ID@REVISION`."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from build_artifacts.checkpoints.checkpoint import HASHED_SUFFIXES, Checkpoint
from build_artifacts.errors import BuildError, SourceNotFound
from build_artifacts.sources.foreign import foreign_weights
from deployments.artifacts.manifest import ModelSource

# The cache of downloads cannot take more, whatever the network does.
_CACHE_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True, slots=True)
class HubListing:
    """One commit of a model on the hub."""

    commit: str
    files: tuple[str, ...]


class Hub(Protocol):
    """What is needed of a hub."""

    def listing(self, model_id: str, revision: str | None) -> HubListing:
        """The commit that `revision` (default: the main branch) stands for now."""
        ...

    def download(self, model_id: str, commit: str, patterns: list[str]) -> Path:
        """A directory with the files of `commit` that match."""
        ...


class HuggingFaceHub:
    """The hub that huggingface_hub is configured for, with its cache and its credentials."""

    def listing(self, model_id: str, revision: str | None) -> HubListing:
        """Raises SourceNotFound."""
        from huggingface_hub import HfApi

        with hub_errors(model_id):
            info = HfApi().model_info(model_id, revision=revision)
        names = tuple(sibling.rfilename for sibling in info.siblings or ())
        return HubListing(str(info.sha), names)

    def download(self, model_id: str, commit: str, patterns: list[str]) -> Path:
        """Raises SourceNotFound."""
        from huggingface_hub import snapshot_download

        with hub_errors(model_id):
            return Path(snapshot_download(model_id, revision=commit, allow_patterns=patterns))


def resolve_hub_model(ref: str, hub: Hub) -> Checkpoint:
    """The checkpoint of a hub model, pinned to one commit; only files that count are fetched."""
    model_id, _, revision = ref.partition("@")
    listing = hub.listing(model_id, revision or None)
    if not any(name.endswith(".safetensors") for name in listing.files):
        raise foreign_weights(f"`{model_id}`", listing.files) or SourceNotFound(
            f"`{model_id}` has no safetensors weights",
            hint="name a revision that has them: `ID@REVISION`",
        )
    patterns = [f"*{suffix}" for suffix in HASHED_SUFFIXES]
    directory = hub.download(model_id, listing.commit, patterns)
    return Checkpoint(directory, ModelSource(ref=ref, revision=listing.commit), default_id=model_id)


@contextmanager
def hub_errors(model_id: str) -> Iterator[None]:
    """Give the hub's failures our name; the original stays as the cause."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    foreign = (httpx2.HTTPError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError)
    try:
        yield
    except foreign as exc:
        if isinstance(exc, OSError) and exc.errno in _CACHE_FAILURES:
            raise BuildError(
                f"cannot keep the files of `{model_id}`: {exc}",
                hint="free space, or let `HF_HOME` name a directory on another disk",
            ) from exc
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise SourceNotFound(
            f"cannot get `{model_id}` from the hub: {reason}",
            hint="check the id and the network, log in with `hf auth login` for a private model, "
            "or build from a directory or a `pypi:` source",
        ) from exc
