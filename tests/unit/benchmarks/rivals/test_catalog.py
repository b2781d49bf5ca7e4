from __future__ import annotations

import re
import string

import pytest

from benchmarks.rivals.catalog import NOT_INSTALLABLE, RIVALS, Rival
from benchmarks.rivals.environments import REQUIREMENTS
from benchmarks.rivals.materials import PROGRAMS, Materials
from benchmarks.rivals.systems import PORT_PLACES

PLACES = {"python", "bin", *PORT_PLACES, *vars(Materials)}
LISTS = sorted(REQUIREMENTS.glob("*.txt"))


def places_of(rival: Rival) -> set[str]:
    words = [*rival.command, *rival.variables.values()]
    return {name for word in words for _, name, _, _ in string.Formatter().parse(word) if name}


@pytest.mark.parametrize("rival", RIVALS.values(), ids=RIVALS)
def test_commands_name_known_places_and_scripts(rival: Rival) -> None:
    assert places_of(rival) <= PLACES
    assert "port" in places_of(rival)
    for word in rival.command:
        if word.startswith("{programs}/"):
            assert (PROGRAMS / word.removeprefix("{programs}/")).is_file()


@pytest.mark.parametrize("rival", RIVALS.values(), ids=RIVALS)
def test_requirements_pin_the_reported_package(rival: Rival) -> None:
    if rival.environment is None:
        return
    lines = (REQUIREMENTS / f"{rival.environment}.txt").read_text().splitlines()
    assert any(re.match(rf"{re.escape(rival.package)}(\[.*\])?==", line) for line in lines)


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_requirements_are_pinned_and_own_one_onnxruntime(path) -> None:
    lines = path.read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+(\[[\w,]+\])?==[\w.]+", line) for line in lines), lines
    assert not any(line.startswith("onnxruntime-gpu") for line in lines)
    assert {line for line in lines if line.startswith("torch==")} <= {"torch==2.13.0"}


def test_every_requirement_list_has_a_rival() -> None:
    assert {path.stem for path in LISTS} == {r.environment for r in RIVALS.values()} - {None}


def test_what_cannot_be_installed_has_a_reason() -> None:
    assert NOT_INSTALLABLE
    assert all(NOT_INSTALLABLE.values())
