from __future__ import annotations

import errno
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from deployments.errors import BadSetting, Forbidden, RateLimited, Unauthorized
from deployments.keys.key import KeyLimits, Scope, generate_key, key_id
from deployments.keys.key_file import read_key_file
from deployments.keys.key_ring import KeyRing
from deployments.watched_file import CHECK_INTERVAL_S
from tests.support.fakes import FakeClock, fail_with
from tests.support.keys import add_key, remove_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_generated_keys_are_long_and_different() -> None:
    keys = {generate_key() for _ in range(100)}
    assert len({key_id(key) for key in keys}) == 100
    assert min(map(len, keys)) >= 54


def test_key_file_has_no_key_and_is_private(path: Path) -> None:
    key = add_key(path)
    assert key not in path.read_text()
    assert key.rpartition("-")[2] not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_valid_key_returns_its_caller(path: Path) -> None:
    key = add_key(path, "alice", scopes=(Scope.INFER, Scope.GPU))
    caller = KeyRing(path).authenticate(key)
    assert (caller.name, caller.scopes) == ("alice", {Scope.INFER, Scope.GPU})


@pytest.mark.parametrize("damage", ["", "hk-", "hk-00000000-x", "x", "hk-" + "0" * 10_000, "hk-é"])
def test_other_texts_are_not_keys(path: Path, damage: str) -> None:
    add_key(path)
    with pytest.raises(Unauthorized, match="not valid"):
        KeyRing(path).authenticate(damage)


@pytest.mark.parametrize(("chars", "is_known"), [(128, True), (129, False)])
def test_keys_have_at_most_128_characters(path: Path, chars: int, is_known: bool) -> None:
    """Longer texts are not even hashed, so that not even their own entry lets them in."""
    key = generate_key().ljust(chars, "0")
    add_key(path, key=key)
    if is_known:
        assert KeyRing(path).authenticate(key).name == "alice"
    else:
        with pytest.raises(Unauthorized, match="not valid"):
            KeyRing(path).authenticate(key)


def test_secret_of_another_key_is_not_valid(path: Path) -> None:
    first, second = add_key(path, "first"), add_key(path, "second")
    mixed = first[: first.index("-", 3)] + second[second.index("-", 3) :]
    with pytest.raises(Unauthorized) as invalid:
        KeyRing(path).authenticate(mixed)
    with pytest.raises(Unauthorized) as unknown:
        KeyRing(path).authenticate(generate_key())
    assert invalid.value.message == unknown.value.message


def test_key_of_an_unknown_id_is_compared_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = add_key(path)
    compared: list[int] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(len(first) == len(second) == 32)
        return first == second

    monkeypatch.setattr("hmac.compare_digest", compare)
    ring = KeyRing(path)
    ring.authenticate(key)
    for wrong in (generate_key(), key + "x", "sk-other"):
        with pytest.raises(Unauthorized):
            ring.authenticate(wrong)
    assert compared == [True] * 4


def test_expired_key_is_refused_and_named(path: Path) -> None:
    now = datetime.now(UTC)
    old = add_key(path, "old", expires=now - timedelta(seconds=1))
    young = add_key(path, "young", expires=now + timedelta(hours=1))
    ring = KeyRing(path)
    with pytest.raises(Unauthorized, match="`old` expired"):
        ring.authenticate(old)
    assert ring.authenticate(young).name == "young"


def test_changed_file_counts_without_a_restart(path: Path) -> None:
    clock = FakeClock()
    alice = add_key(path, "alice")
    ring = KeyRing(path, clock)
    bob = add_key(path, "bob")
    remove_key(path, "alice")
    clock.now_s += CHECK_INTERVAL_S
    assert ring.authenticate(bob).name == "bob"
    with pytest.raises(Unauthorized):
        ring.authenticate(alice)


def test_changed_secret_of_kubernetes_counts_without_a_restart(tmp_path: Path) -> None:
    """A link leads to the directory of the files. Kubernetes replaces the link."""
    clock = FakeClock()
    keys = [add_key(tmp_path / name / "keys.json", name) for name in ("first", "second")]
    (tmp_path / "..data").symlink_to("first")
    path = tmp_path / "keys.json"
    path.symlink_to("..data/keys.json")
    ring = KeyRing(path, clock)
    assert ring.authenticate(keys[0]).name == "first"
    (tmp_path / "..new").symlink_to("second")
    (tmp_path / "..new").rename(tmp_path / "..data")
    clock.now_s += CHECK_INTERVAL_S
    assert ring.authenticate(keys[1]).name == "second"
    with pytest.raises(Unauthorized):
        ring.authenticate(keys[0])


@pytest.mark.parametrize("damage", [None, "{", '{"keys": [{"name": "alice"}]}', "[]"])
def test_damaged_file_keeps_the_previous_keys(
    path: Path, damage: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    key = add_key(path)
    ring = KeyRing(path, clock)
    path.unlink() if damage is None else path.write_text(damage)
    clock.now_s += CHECK_INTERVAL_S
    assert ring.authenticate(key).name == "alice"
    assert "the previous keys stay in use" in caplog.text
    with pytest.raises(BadSetting, match=str(path)):
        KeyRing(path)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE])
def test_revoked_key_is_refused_after_a_failed_read(
    error: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    key = add_key(path, "alice")
    ring = KeyRing(path, clock)
    remove_key(path, "alice")
    with monkeypatch.context() as failing:
        failing.setattr(Path, "read_bytes", fail_with(error))
        clock.now_s += CHECK_INTERVAL_S
        assert ring.authenticate(key).name == "alice"
    if error == errno.EACCES:  # an operator corrects the rights
        time.sleep(0.02)  # s; file systems count time in steps of a few milliseconds
        path.chmod(0o640)
    clock.now_s += CHECK_INTERVAL_S
    with pytest.raises(Unauthorized):
        ring.authenticate(key)


def test_repeated_names_are_refused(path: Path) -> None:
    add_key(path, "alice")
    with pytest.raises(ValueError, match="two keys have the name `alice`"):
        add_key(path, "alice")
    assert len(read_key_file(path).keys) == 1


@pytest.mark.parametrize(
    ("patterns", "allowed", "refused"),
    [
        (("*",), ["a/b", "c"], []),
        (("org/*",), ["org/a", "org/b/c"], ["other/a", "org", "xorg/a"]),
        (("a/b", "c*"), ["a/b", "cd"], ["a/bc", "dc"]),
        (("a.c/*",), ["a.c/x"], ["abc/x"]),
    ],
)
def test_model_patterns(
    path: Path, patterns: tuple[str, ...], allowed: list[str], refused: list[str]
) -> None:
    key = add_key(path, models=patterns)
    caller = KeyRing(path).authenticate(key)
    for model_id in allowed:
        caller.require_model(model_id)
    for model_id in refused:
        with pytest.raises(Forbidden, match="does not permit"):
            caller.require_model(model_id)


def test_requests_in_flight_stay_counted_when_limits_change(path: Path) -> None:
    clock = FakeClock()
    key = add_key(path, limits=KeyLimits(concurrent_requests=1))
    ring = KeyRing(path, clock)
    ring.authenticate(key).meter.enter(1)
    # Another size shows the change even if the time of the file stays the same: file systems count
    # time in steps of a few milliseconds.
    path.write_text(
        path.read_text().replace('"concurrent_requests": 1', '"concurrent_requests":  2')
    )
    clock.now_s += CHECK_INTERVAL_S
    ring.authenticate(key).meter.enter(1)
    with pytest.raises(RateLimited):
        ring.authenticate(key).meter.enter(1)
