"""Strict linter for Serve configs. Ray Serve itself ignores unknown keys."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ray.serve.schema import ServeDeploySchema

from cluster.config_entries import find_applications
from cluster.linting.application import find_wrong_names, project_sections
from cluster.linting.document import LintProblem, UnreadableConfig, YamlDocument, read_document
from cluster.linting.rules import check_exposure, check_packages, check_rules
from cluster.linting.schema import KeyFinding, find_problems, sections
from cluster.linting.value_rules import check_values


def check_text(
    text: str,
    *,
    is_deployed: bool = True,
    runs_here: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> list[LintProblem]:
    """Return all problems of a config, ordered by line.

    `is_deployed`: Serve applies the config unchanged, as `serve deploy` does. Only then check that
    other hosts cannot connect without API keys. `hundredfold serve` may replace host and key file,
    so it checks the result itself. `hundredfold render` may add the key file of a mounted secret.
    `runs_here`: replicas have the packages of this environment, which then must be complete.
    `environment`: variables of the replicas, which may name a key file.
    """
    try:
        document = read_document(text)
    except UnreadableConfig as exc:
        return [exc.problem]
    findings = list(_findings(document))
    if is_deployed:
        findings += check_exposure(document.value, environment)
    if runs_here:
        findings += check_packages(document.value)
    problems = dict.fromkeys(document.problem(*finding) for finding in findings)
    return sorted(problems, key=lambda problem: problem.line)


def check_file(path: Path, *, is_deployed: bool = True) -> list[LintProblem]:
    """Return all problems of a file. Raises OSError or UnicodeDecodeError if it is unreadable."""
    text = path.read_text(encoding="utf-8")
    return check_text(text, is_deployed=is_deployed, runs_here=True)


def report(name: str, problems: list[LintProblem]) -> str:
    """Format a line per problem as compilers do: `name:LINE: path: message`."""
    return "\n".join(
        f"{name}:{p.line}: " + (f"{p.path}: " if p.path else "") + p.message for p in problems
    )


def _findings(document: YamlDocument) -> Iterator[KeyFinding]:
    if not isinstance(document.value, dict):
        yield (), "a Serve config is a mapping with a list of `applications`"
        return
    for path in document.duplicates:
        yield path, "this key occurs twice; Serve ignores the first value"
    for section in sections(ServeDeploySchema, document.value, ()):
        yield from find_problems(section)
    for application in find_applications(document.value):
        yield from find_wrong_names(application)
        for section in project_sections(application):
            yield from find_problems(section)
    yield from check_values(document.value)
    yield from check_rules(document.value)
