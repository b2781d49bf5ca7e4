from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments import errors
from deployments.artifacts.manifest import MANIFEST_NAME, ArtifactManifest
from deployments.artifacts.store import (
    LATEST_NAME,
    model_directory,
    resolve_inside,
    resolve_version,
    set_latest,
)
from deployments.artifacts.types import Device
from tests.support.artifacts import GRAPH_NAME, seal_tiny, tiny_manifest

Damage = Callable[[Path], None]


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / MANIFEST_NAME
        manifest = json.loads(path.read_bytes())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return damage


def write_manifest(text: bytes) -> Damage:
    return lambda directory: (directory / MANIFEST_NAME).write_bytes(text)


def drop_last_byte(directory: Path) -> None:
    graph = directory / GRAPH_NAME
    graph.write_bytes(graph.read_bytes()[:-1])


def flip_a_bit(directory: Path) -> None:
    graph = directory / GRAPH_NAME
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)


def lose_the_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def link_graph_to(target: str) -> Damage:
    def damage(directory: Path) -> None:
        graph = directory / GRAPH_NAME
        graph.rename(directory / "graphs" / "elsewhere")
        graph.symlink_to(target)

    return damage


def link_graphs_outside(directory: Path) -> None:
    graphs = directory / "graphs"
    outside = directory.parent / "outside"
    graphs.rename(outside)
    graphs.symlink_to(outside)


def point_at(name: str) -> Damage:
    """Claim a file `name`, and make the graph's digest its own."""
    return edit_manifest(lambda m: m["files"].update({name: m["files"][GRAPH_NAME]}))


def claim(key: str, value: object) -> Damage:
    return edit_manifest(lambda m: m.update({key: value}))


def option(name: str, value: object) -> Damage:
    return edit_manifest(lambda m: m["candidates"][0]["options"].update({name: value}))


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (drop_last_byte, errors.DigestMismatch, GRAPH_NAME),
        (flip_a_bit, errors.DigestMismatch, GRAPH_NAME),
        (lose_the_tokenizer, errors.DigestMismatch, "tokenizer.json"),
        (link_graph_to("elsewhere"), errors.DigestMismatch, GRAPH_NAME),
        (link_graph_to("/etc/passwd"), errors.PathOutsideArtifact, GRAPH_NAME),
        (link_graph_to("tiny.onnx"), errors.PathOutsideArtifact, GRAPH_NAME),  # to itself
        (link_graphs_outside, errors.PathOutsideArtifact, GRAPH_NAME),
        (point_at("../../etc/passwd"), errors.PathOutsideArtifact, "../../etc/passwd"),
        (point_at("/etc/passwd"), errors.PathOutsideArtifact, "/etc/passwd"),
        (point_at("graphs\\..\\x"), errors.PathOutsideArtifact, "graphs\\..\\x"),
        (point_at("nul\0byte"), errors.PathOutsideArtifact, "nul\0byte"),
        (point_at("long" * 500), errors.DigestMismatch, "long"),
        (point_at("graphs"), errors.DigestMismatch, "graphs"),
        (claim("schema_version", 99), errors.ManifestTooNew, "99"),
        (claim("schema_version", "new"), errors.ManifestInvalid, "schema_version"),
        (claim("tasks", ["poetry"]), errors.UnknownTask, "poetry"),
        (claim("tasks", [{}]), errors.UnknownTask, "{}"),
        (claim("tasks", []), errors.ManifestInvalid, "tasks"),
        (claim("tasks", "feature-extraction"), errors.ManifestInvalid, "tasks"),
        (claim("remote_code", "model.py"), errors.ManifestInvalid, "remote_code"),
        (claim("candidates", []), errors.ManifestInvalid, "candidates"),
        (
            option("tensor_parallel_size", 2),
            errors.ManifestInvalid,
            "onnxruntime has no `tensor_parallel_size`",
        ),
        (option("kv_offload", True), errors.ManifestInvalid, "no `kv_offload`"),
        (claim("max_tokens", 0), errors.ManifestInvalid, "max_tokens"),
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
        (write_manifest(b"{"), errors.ManifestInvalid, MANIFEST_NAME),
        (write_manifest(b"\xff"), errors.ManifestInvalid, MANIFEST_NAME),
        (write_manifest(b"[]"), errors.ManifestInvalid, MANIFEST_NAME),
        (write_manifest(b"[" * 100_000), errors.ManifestInvalid, MANIFEST_NAME),
    ],
)
def test_a_damaged_artifact_is_refused_by_name(
    damage: Damage, error: type[errors.ArtifactError], named: str, tmp_path: Path
) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    damage(directory)
    with pytest.raises(error) as refusal:
        ArtifactManifest.read(directory)
    assert type(refusal.value) is error
    assert named in refusal.value.message


def test_a_sealed_artifact_reads_back_as_it_was_written(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model", labels=("NO", "YES"))
    manifest = ArtifactManifest.read(directory)
    assert manifest.labels == ("NO", "YES")
    assert manifest.to_json() == (directory / MANIFEST_NAME).read_bytes()


def test_a_file_that_nobody_sealed_is_not_looked_at(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    (directory / "notes.txt").write_text("left by somebody")
    assert "notes.txt" not in ArtifactManifest.read(directory).files


@pytest.mark.parametrize(
    ("devices", "asked", "found"),
    [
        ((Device.CPU, Device.GPU), Device.GPU, "tiny-gpu"),
        ((Device.CPU,), Device.GPU, None),
        ((Device.CPU,), Device.CPU, "tiny-cpu"),
    ],
)
def test_the_first_graph_for_a_device_is_its_default(
    devices: tuple[Device, ...], asked: Device, found: str | None
) -> None:
    candidate = tiny_manifest(devices=devices).candidate_for(asked)
    assert (candidate and candidate.name) == found


@pytest.mark.parametrize(
    "model_id",
    [
        *("", ".", "..", "../x", "a/../b", "a//b", "/a", "a/", "a/b/c"),
        *("a--b", ".hidden/x", "-x/y", "a b", "a\n", "a\0b", "a\\b"),
    ],
)
def test_what_is_no_model_id_never_becomes_a_path(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ManifestInvalid):
        model_directory(tmp_path, model_id)


def test_an_organisation_becomes_part_of_the_directory_name(tmp_path: Path) -> None:
    assert model_directory(tmp_path, "org/name-v1.5_x").name == "org--name-v1.5_x"
    assert model_directory(tmp_path, "plain").name == "plain"


def test_latest_is_what_was_pointed_at_last(tmp_path: Path) -> None:
    sealed = seal_tiny(tmp_path, "tiny/model")
    newer = sealed.with_name("feedfeedfeed")
    newer.mkdir()
    assert resolve_version(tmp_path, "tiny/model", "latest") == sealed.name
    set_latest(tmp_path, "tiny/model", newer.name)
    assert resolve_version(tmp_path, "tiny/model", "latest") == newer.name
    assert resolve_version(tmp_path, "tiny/model", sealed.name) == sealed.name


@pytest.mark.parametrize("version", ["0123456789ab", "../escape", "LATEST", ""])
def test_a_version_nobody_built_is_missing(version: str, tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/model")
    with pytest.raises(errors.ArtifactMissing):
        resolve_version(tmp_path, "tiny/model", version)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"../../etc", b"0123456789ab"])
def test_a_damaged_latest_pointer_is_a_missing_artifact(content: bytes, tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    (directory.parent / LATEST_NAME).write_bytes(content)
    with pytest.raises(errors.ArtifactMissing):
        resolve_version(tmp_path, "tiny/model", "latest")


def test_a_model_that_was_never_built_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(errors.ArtifactMissing, match="hundredfold build"):
        resolve_version(tmp_path, "never/built", "latest")


def test_a_contained_path_may_lie_deep_inside(tmp_path: Path) -> None:
    assert resolve_inside(tmp_path, "a/b/c") == tmp_path / "a/b/c"
