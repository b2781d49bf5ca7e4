from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.keys import parse_expiry
from deployments.errors import BadSetting, Unauthorized
from deployments.keys.key_file import read_key_file
from deployments.keys.key_ring import KeyRing
from hundredfold.__main__ import main
from tests.support.no_home import remove_home

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "keys.json"


def run(*words: str, path: Path) -> int:
    return main(["keys", *words, "--file", str(path)])


def test_add_prints_a_key_that_works(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("add", "alice", "--scope", "infer", "--scope", "gpu", "--model", "org/*",
               "--requests-per-minute", "60", path=path) == 0  # fmt: skip
    key = capsys.readouterr().out.strip()
    caller = KeyRing(path).authenticate(key)
    assert caller.name == "alice"
    assert not caller.may_use_model("other/model")
    assert read_key_file(path).keys[0].limits.requests_per_minute == 60


def test_key_is_revoked_through_a_link(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = path.parent.parent / "linked.json"
    link.symlink_to(path)
    assert run("add", "alice", path=link) == 0
    key = capsys.readouterr().out.strip()
    assert KeyRing(path).authenticate(key).name == "alice"
    assert run("revoke", "alice", path=link) == 0
    assert link.is_symlink()
    with pytest.raises(Unauthorized):
        KeyRing(path).authenticate(key)


def test_key_file_replaces_a_link_to_itself(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.parent.mkdir()
    path.symlink_to(path)
    assert run("add", "alice", path=path) == 0
    assert KeyRing(path).authenticate(capsys.readouterr().out.strip()).name == "alice"


def test_json_of_all_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*words: str) -> Any:
        assert run(*words, "--json", path=path) == 0
        return json.loads(capsys.readouterr().out)

    added = answer("add", "alice", "--expires", "90d")
    key = added.pop("key")
    assert KeyRing(path).authenticate(key).name == "alice"
    assert answer("ls") == [added]
    assert answer("change", "alice", "--model", "*") == [added]
    assert "sha256" not in added
    assert [revoked["name"] for revoked in answer("revoke", added["id"])] == ["alice"]
    assert answer("ls") == []


def test_change_keeps_the_secret_and_what_is_not_named(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("add", "team", "--model", "org/*", "--expires", "90d", "--requests-per-minute", "60",
        "--tokens-per-minute", "9", path=path)  # fmt: skip
    key = capsys.readouterr().out.strip()
    before = read_key_file(path).keys[0]
    assert run("change", "team", "--scope", "infer", "--scope", "gpu", "--expires", "never",
               "--requests-per-minute", "6000", "--tokens-per-minute", "any",
               "--concurrent-requests", "4", path=path) == 0  # fmt: skip
    changed = read_key_file(path).keys[0]
    assert KeyRing(path).authenticate(key).name == "team"
    assert (changed.models, changed.created) == (before.models, before.created)
    assert (changed.scopes, changed.expires) == (("infer", "gpu"), None)
    assert changed.limits.model_dump(exclude_none=True) == {
        "requests_per_minute": 6000,
        "concurrent_requests": 4,
    }
    assert "6000 requests per minute" in capsys.readouterr().out


def test_list_is_a_table(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("add", "alice", "--tokens-per-minute", "9", path=path)
    capsys.readouterr()
    assert run("ls", path=path) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "id", "scopes", "models", "expires", "limits"]
    assert row.startswith("alice")
    assert row.endswith("9 tokens per minute")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "alice"], "has a key named `alice`"),
        (["add", "two words"], "`name`"),
        (["add", "bob", "--concurrent-requests", "0"], "`--concurrent-requests`"),
        (["add", "bob", "--expires", "soon"], "neither a date"),
        (["add", "bob", "--expires", "2001-01-01"], "is not in the future"),
        (["add", "bob", "--expires", "0d"], "is not in the future"),
        (["add", "bob", "--expires", "9999999d"], "is after the year 9999"),
        (["add", "bob", "--expires", "99999999999d"], "is after the year 9999"),
        (["revoke", "bob"], "has no key `bob`"),
        (["change", "bob", "--scope", "gpu"], "has no key `bob`"),
        (["change", "alice", "--requests-per-minute", "0"], "`--requests-per-minute`"),
        (["add", "bob", "--requests-per-minute", ""], "`--requests-per-minute`"),
        (["change", "alice", "--expires", ""], "neither a date"),
        (["change", "alice"], "no option names what to change"),
        (["change", "alice", "--tokens-per-minute", "few"], "`--tokens-per-minute`"),
        (["change", "alice", "--expires", "2001-01-01"], "is not in the future"),
    ],
)
def test_failed_command_changes_nothing(
    words: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("add", "alice", path=path)
    before = path.read_text()
    assert run(*words, path=path) == 1
    assert message in capsys.readouterr().err
    assert path.read_text() == before


def test_list_of_a_missing_file_says_how_to_create_it(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls", path=path) == 1
    assert "hundredfold keys add" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90d", datetime(2030, 4, 1, tzinfo=UTC)),
        ("12h", datetime(2030, 1, 1, 12, tzinfo=UTC)),
        ("2030-01-31", datetime(2030, 1, 31, tzinfo=UTC)),
        ("2030-01-31T10:00+02:00", datetime(2030, 1, 31, 8, tzinfo=UTC)),
    ],
)
def test_expiry_is_an_age_or_a_date(text: str, expected: datetime) -> None:
    assert parse_expiry(text, NOW) == expected
    with pytest.raises(BadSetting):
        parse_expiry("1 fortnight", NOW)


def test_missing_key_file_of_an_unknown_user_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HUNDREDFOLD_KEYS", "~no-such-user/keys.json")
    assert main(["keys", "ls"]) == 1
    assert "`~no-such-user/keys.json`" in capsys.readouterr().err


def test_key_is_not_written_below_a_missing_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remove_home(monkeypatch)
    monkeypatch.delenv("HUNDREDFOLD_KEYS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "add", "alice"]) == 1
    assert "set $HOME" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert run("add", "alice", path=tmp_path / "keys.json") == 0
