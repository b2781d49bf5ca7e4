from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments import errors
from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest
from deployments.artifacts.migration import PREVIOUS, SCHEMA
from deployments.artifacts.store import (
    LATEST_NAME,
    model_directory,
    resolve_inside,
    resolve_version,
    set_latest,
)
from deployments.artifacts.types import Device
from tests.support import released
from tests.support.artifacts import GRAPH_NAME, make_previous, seal_tiny, tiny_manifest

ManifestDamage = Callable[[Path], None]


# The schema version, and the fingerprint of what a manifest may contain.
PINNED = (5, "2c3ed320457852c9")


def test_a_change_of_the_manifest_raises_its_schema_version() -> None:
    described = json.dumps(describe_schema(ArtifactManifest.model_json_schema()), sort_keys=True)
    fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]
    version = max(SCHEMA, released.SCHEMA + 1)
    assert (SCHEMA, fingerprint) == PINNED, (
        "a field of manifests changed, so the last release cannot read them. Set `SCHEMA` in "
        f"deployments/artifacts/migration.py to {version}, let `upgrade` there convert manifests "
        f'of the version before, and set `PINNED` of this test to ({version}, "{fingerprint}")'
    )


def describe_schema(schema: Any) -> Any:
    """Return a JSON schema without texts and defaults. Manifests contain every field."""
    match schema:
        case dict():
            return {
                key: describe_schema(value)
                for key, value in schema.items()
                if key not in ("title", "description", "default")
            }
        case list():
            return list(map(describe_schema, schema))
    return schema


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> ManifestDamage:
    def damage(directory: Path) -> None:
        path = directory / MANIFEST_NAME
        manifest = json.loads(path.read_bytes())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return damage


def write_manifest(text: bytes) -> ManifestDamage:
    return lambda directory: (directory / MANIFEST_NAME).write_bytes(text)


def drop_last_byte(directory: Path) -> None:
    graph = directory / GRAPH_NAME
    graph.write_bytes(graph.read_bytes()[:-1])


def flip_bit(directory: Path) -> None:
    graph = directory / GRAPH_NAME
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)


def delete_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def link_graph_to(target: str) -> ManifestDamage:
    def damage(directory: Path) -> None:
        graph = directory / GRAPH_NAME
        graph.rename(directory / "graphs" / "elsewhere")
        graph.symlink_to(target)

    return damage


def link_graph_directory_outside(directory: Path) -> None:
    graphs = directory / "graphs"
    outside = directory.parent / "outside"
    graphs.rename(outside)
    graphs.symlink_to(outside)


def replace_manifest_by_directory(directory: Path) -> None:
    (directory / MANIFEST_NAME).unlink()
    (directory / MANIFEST_NAME).mkdir()


def add_file(name: str) -> ManifestDamage:
    """Add a file `name` with the digest of the graph to the manifest."""
    return edit_manifest(lambda m: m["files"].update({name: m["files"][GRAPH_NAME]}))


def set_field(key: str, value: object) -> ManifestDamage:
    return edit_manifest(lambda m: m.update({key: value}))


def set_option(name: str, value: object) -> ManifestDamage:
    return edit_manifest(lambda m: m["candidates"][0]["options"].update({name: value}))


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (drop_last_byte, errors.DigestMismatch, GRAPH_NAME),
        (flip_bit, errors.DigestMismatch, GRAPH_NAME),
        (delete_tokenizer, errors.DigestMismatch, "tokenizer.json"),
        (link_graph_to("elsewhere"), errors.DigestMismatch, GRAPH_NAME),
        (link_graph_to("/etc/passwd"), errors.PathOutsideArtifact, GRAPH_NAME),
        (link_graph_to("tiny.onnx"), errors.PathOutsideArtifact, GRAPH_NAME),  # a link to itself
        (link_graph_directory_outside, errors.PathOutsideArtifact, GRAPH_NAME),
        (add_file("../../etc/passwd"), errors.PathOutsideArtifact, "../../etc/passwd"),
        (add_file("/etc/passwd"), errors.PathOutsideArtifact, "/etc/passwd"),
        (add_file("graphs\\..\\x"), errors.PathOutsideArtifact, "graphs\\..\\x"),
        (add_file("nul\0byte"), errors.PathOutsideArtifact, "nul\0byte"),
        (add_file("long" * 500), errors.DigestMismatch, "long"),
        (add_file("graphs"), errors.DigestMismatch, "graphs"),
        (set_field("schema_version", 99), errors.ManifestTooNew, "99"),
        (
            set_field("schema_version", PREVIOUS - 1),
            errors.ManifestInvalid,
            "Build the model again",
        ),
        (set_field("schema_version", "new"), errors.ManifestInvalid, "schema_version"),
        (set_field("tasks", [{}]), errors.ManifestInvalid, "tasks.0"),
        (set_field("tasks", []), errors.ManifestInvalid, "tasks"),
        (set_field("tasks", "feature-extraction"), errors.ManifestInvalid, "tasks"),
        (set_field("remote_code", "model.py"), errors.ManifestInvalid, "remote_code"),
        (set_field("candidates", []), errors.ManifestInvalid, "candidates"),
        (
            set_option("tensor_parallel_size", 2),
            errors.ManifestInvalid,
            "onnxruntime has no `tensor_parallel_size`",
        ),
        (set_option("kv_offload", True), errors.ManifestInvalid, "no `kv_offload`"),
        (set_option("attention", "flash"), errors.ManifestInvalid, "no `flash` attention"),
        (set_field("max_tokens", 0), errors.ManifestInvalid, "max_tokens"),
        (
            edit_manifest(lambda m: m["files"].pop(GRAPH_NAME)),
            errors.DigestMismatch,
            GRAPH_NAME,
        ),
        (
            edit_manifest(lambda m: m["files"].pop("tokenizer.json")),
            errors.ManifestInvalid,
            "tokenizer.json",
        ),
        (
            lambda d: (d / "graphs" / "weights.data").write_bytes(b"external"),
            errors.DigestMismatch,
            "weights.data",
        ),
        (edit_manifest(lambda m: m.pop("id")), errors.ManifestInvalid, "id"),
        (lambda d: (d / MANIFEST_NAME).unlink(), errors.ArtifactMissing, MANIFEST_NAME),
        (replace_manifest_by_directory, errors.ManifestInvalid, "Is a directory"),
        (write_manifest(b"{"), errors.ManifestInvalid, MANIFEST_NAME),
        (write_manifest(b"\xff"), errors.ManifestInvalid, MANIFEST_NAME),
        (write_manifest(b"[]"), errors.ManifestInvalid, MANIFEST_NAME),
        (write_manifest(b"[" * 100_000), errors.ManifestInvalid, MANIFEST_NAME),
    ],
)
def test_read_of_a_damaged_artifact_names_the_damage(
    damage: ManifestDamage, error: type[errors.ArtifactError], named: str, tmp_path: Path
) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    damage(directory)
    with pytest.raises(error) as raised:
        ArtifactManifest.read(directory)
    assert type(raised.value) is error
    assert named in raised.value.message
    assert raised.value.message.startswith(f"tiny/model@{directory.name}: `")
    assert str(tmp_path) not in raised.value.message, "clients read it"


def test_read_of_a_sealed_artifact_returns_its_manifest(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model", labels=("NO", "YES"))
    manifest = ArtifactManifest.read(directory)
    assert manifest.labels == ("NO", "YES")
    assert manifest.to_json() == (directory / MANIFEST_NAME).read_bytes()


def test_read_ignores_files_outside_the_manifest(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    (directory / "notes.txt").write_text("not in the manifest")
    assert "notes.txt" not in ArtifactManifest.read(directory).files


@pytest.mark.parametrize(
    ("devices", "device", "expected"),
    [
        ((Device.CPU, Device.GPU), Device.GPU, "tiny-gpu"),
        ((Device.CPU,), Device.GPU, None),
        ((Device.CPU,), Device.CPU, "tiny-cpu"),
    ],
)
def test_candidate_for_returns_the_first_of_the_device(
    devices: tuple[Device, ...], device: Device, expected: str | None
) -> None:
    candidate = tiny_manifest(devices=devices).candidate_for(device)
    assert (candidate and candidate.name) == expected


@pytest.mark.parametrize(
    "model_id",
    [
        *("", ".", "..", "../x", "a/../b", "a//b", "/a", "a/", "a/b/c"),
        *("a--b", ".hidden/x", "-x/y", "a b", "a\n", "a\0b", "a\\b"),
    ],
)
def test_model_directory_rejects_invalid_ids(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ManifestInvalid):
        model_directory(tmp_path, model_id)


def test_model_directory_contains_the_organization(tmp_path: Path) -> None:
    assert model_directory(tmp_path, "org/name-v1.5_x").name == "org--name-v1.5_x"
    assert model_directory(tmp_path, "plain").name == "plain"


def test_latest_resolves_to_the_version_set_last(tmp_path: Path) -> None:
    sealed = seal_tiny(tmp_path, "tiny/model")
    newer = sealed.with_name("feedfeedfeed")
    newer.mkdir()
    assert resolve_version(tmp_path, "tiny/model", "latest") == sealed.name
    set_latest(tmp_path, "tiny/model", newer.name)
    assert resolve_version(tmp_path, "tiny/model", "latest") == newer.name
    assert resolve_version(tmp_path, "tiny/model", sealed.name) == sealed.name


@pytest.mark.parametrize("version", ["0123456789ab", "../escape", "LATEST", ""])
def test_resolve_version_of_an_unknown_version_raises(version: str, tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/model")
    with pytest.raises(errors.ArtifactMissing, match="`tiny/model`") as raised:
        resolve_version(tmp_path, "tiny/model", version)
    assert str(tmp_path) not in raised.value.message


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", errors.LatestInvalid),
        (b"\xff\xfe", errors.LatestInvalid),
        (b"../../etc", errors.LatestInvalid),
        (b"0123456789ab", errors.ArtifactMissing),
    ],
)
def test_resolve_version_with_a_damaged_latest_file_raises(
    content: bytes, error: type[Exception], tmp_path: Path
) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    (directory.parent / LATEST_NAME).write_bytes(content)
    with pytest.raises(error):
        resolve_version(tmp_path, "tiny/model", "latest")


def test_resolve_version_of_a_missing_model_hints_at_the_build(tmp_path: Path) -> None:
    with pytest.raises(errors.ArtifactMissing, match="hundredfold build"):
        resolve_version(tmp_path, "never/built", "latest")


def test_resolve_inside_accepts_nested_paths(tmp_path: Path) -> None:
    assert resolve_inside(tmp_path, "a/b/c") == tmp_path / "a/b/c"


def test_manifest_of_the_previous_schema_loads(tmp_path: Path) -> None:
    artifact = seal_tiny(tmp_path, "tiny/model")
    now = ArtifactManifest.read(artifact)
    make_previous(artifact)
    assert ArtifactManifest.read(artifact) == now
    assert now.schema_version == SCHEMA


@pytest.mark.parametrize("candidates", [None, 7, [7], [{"options": 7}]])
def test_damaged_manifest_of_the_previous_schema_is_invalid(
    candidates: object, tmp_path: Path
) -> None:
    artifact = seal_tiny(tmp_path, "tiny/model")
    make_previous(artifact)
    path = artifact / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"candidates": candidates}))
    with pytest.raises(errors.ManifestInvalid):
        ArtifactManifest.read(artifact)
