from __future__ import annotations

import jsonschema
import pytest

from deployments.ingress.apis.text2text.routes import clean_up_spaces, text2text_body_schemas


@pytest.mark.parametrize(
    ("text", "tidy"),
    [
        ("It is , he said , late .", "It is, he said, late."),
        ("Why ? Oh !", "Why? Oh!"),
        ("It is n't so , he 's sure", "It isn't so, he's sure"),
        ("I 'm late ; you 've gone , we 're here", "I'm late ; you've gone, we're here"),
        ("the birds ' wings", "the birds'wings"),
        ("nothing to do", "nothing to do"),
    ],
)
def test_clean_up_spaces_removes_spaces_before_marks_and_contractions(text: str, tidy: str) -> None:
    assert clean_up_spaces(text) == tidy


@pytest.mark.parametrize("schema", text2text_body_schemas(), ids=lambda schema: schema["title"])
def test_client_bodies_fit_the_documented_schema(schema: dict[str, object]) -> None:
    flat = {"num_beams": 2, "early_stopping": "never", "truncation": "only_first"}
    for parameters in (flat, {"generate_parameters": flat}, {"generate_kwargs": flat, **flat}):
        jsonschema.validate({"inputs": ["a"], "parameters": parameters}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"inputs": "a", "parameters": {"beams": 2}}, schema)
