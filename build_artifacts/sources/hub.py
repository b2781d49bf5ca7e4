"""Checkpoint from a Hugging Face hub: `ID` or `ID@REVISION` of a model."""

from __future__ import annotations

import errno
import glob
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from build_artifacts.checkpoints.adapter import ADAPTER_STEM
from build_artifacts.checkpoints.architectures import read_model_class
from build_artifacts.checkpoints.checkpoint import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    Checkpoint,
    is_hashed,
)
from build_artifacts.checkpoints.checks import adapter_without_model_error, check_description
from build_artifacts.checkpoints.file_formats import SAFETENSORS_SUFFIX, unread_weights_error
from build_artifacts.errors import BuildError, SourceNotFound, first_line
from build_artifacts.sources.tokenizer import check_vocabulary_files
from deployments.artifacts.manifest import ModelSource

# Errors of the local download cache, independent of the network.
_CACHE_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


CheckpointCheck = Callable[[Checkpoint], None]  # raises BuildError for a refused checkpoint


@dataclass(frozen=True, slots=True)
class HubListing:
    """Files of a model at one commit."""

    commit: str
    files: tuple[str, ...]


class Hub(Protocol):
    """Operations of a model hub that the build needs."""

    def listing(self, model_id: str, revision: str | None) -> HubListing:
        """Resolve `revision` (default: the main branch) to a commit and list its files.

        If the hub does not answer, use the commit of the last download. Raises SourceNotFound if
        nothing was downloaded, or if the hub has no such revision.
        """
        ...

    def download(self, model_id: str, commit: str, files: list[str]) -> Path:
        """Download these files and return their directory.

        Raises SourceNotFound if the download fails, BuildError if the local disk is full or
        read-only.
        """
        ...


class HuggingFaceHub:
    """The hub that huggingface_hub is configured for, with its cache and credentials."""

    def listing(self, model_id: str, revision: str | None) -> HubListing:
        from huggingface_hub import HfApi, RepoFile, get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        api = HfApi()
        with hub_errors(model_id):
            # huggingface_hub logs a warning if it falls back to the cached commit.
            commit = api.resolve_revision(model_id, revision=revision).resolved
            try:
                # A snapshot directory may lack files, so it is no substitute for this list.
                entries = get_cached_repo_tree(model_id, revision=commit)
            except CachedRepoTreeNotFoundError:
                entries = list(api.list_repo_tree(model_id, recursive=True, revision=commit))
        names = tuple(entry.path for entry in entries if isinstance(entry, RepoFile))
        return HubListing(str(commit), names)

    def download(self, model_id: str, commit: str, files: list[str]) -> Path:
        from huggingface_hub import snapshot_download

        patterns = [glob.escape(name) for name in files]
        with hub_errors(model_id):
            return Path(snapshot_download(model_id, revision=commit, allow_patterns=patterns))


def resolve_hub_model(ref: str, hub: Hub, check: CheckpointCheck = check_description) -> Checkpoint:
    """Download the files of a hub model that `is_hashed` accepts, at one commit.

    The weights come last, if `check` accepts the other files: a refusal costs no gigabytes. Raises
    BuildError if the model has no safetensors weights or no vocabulary that the build reads, or if
    the download fails, and the errors of `check`.
    """
    model_id, at, revision = ref.partition("@")
    if at and not revision:
        raise SourceNotFound(
            f"`{ref}` names no revision after `@`", hint=f"`{model_id}` builds the main branch"
        )
    listing = hub.listing(model_id, revision or None)
    source = ModelSource(ref=ref, revision=listing.commit)

    def download(files: list[str]) -> Checkpoint:
        return Checkpoint(hub.download(model_id, listing.commit, files), source, model_id)

    files = [name for name in listing.files if is_hashed(name)]
    weights = [name for name in files if name.endswith(SAFETENSORS_SUFFIX)]
    if not weights:
        has_config = CONFIG_NAME in listing.files
        model_class = read_model_class(download([CONFIG_NAME]).directory) if has_config else ""
        raise unread_weights_error(f"`{model_id}`", listing.files, model_class) or SourceNotFound(
            f"`{model_id}` has no safetensors weights in the layout of transformers",
            hint="name a revision that has them: `ID@REVISION`",
        )
    if ADAPTER_CONFIG_NAME in files and all(name.startswith(ADAPTER_STEM) for name in weights):
        raise adapter_without_model_error(download([ADAPTER_CONFIG_NAME]))
    check_vocabulary_files(f"`{model_id}`", listing.files)
    check(download([name for name in files if name not in weights]))
    return download(files)


@contextmanager
def hub_errors(model_id: str) -> Iterator[None]:
    """Translate errors of huggingface_hub to SourceNotFound.

    Raises BuildError instead if the local disk is full or read-only.
    """
    import httpx2
    from huggingface_hub.errors import HFValidationError, RevisionResolutionError

    foreign = (
        *(httpx2.HTTPError, HFValidationError, RevisionResolutionError),
        OSError,  # includes HfHubHTTPError and OfflineModeIsEnabled
        RuntimeError,  # raised by hf_xet, for example without a connection to its storage
    )
    try:
        yield
    except foreign as exc:
        if isinstance(exc, OSError) and exc.errno in _CACHE_FAILURES:
            raise BuildError(
                f"cannot store the files of `{model_id}`: {exc}",
                hint="free disk space, or set `HF_HOME` to a directory on another disk",
            ) from exc
        where = "" if "/" in model_id else f"no directory `{model_id}` is here, and the "
        raise SourceNotFound(
            f"{where}cannot download `{model_id}` from the hub: {first_line(exc)}",
            hint="check the id and the network, log in with `hf auth login` for a private model, "
            "or build from a directory or a `pypi:` source",
        ) from exc
