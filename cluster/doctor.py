"""`hundredfold doctor`: findings about this host, their meaning for serving, and remedies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from cluster.default_config import CONFIG_HELP, find_config
from cluster.diagnosis import Finding, HostDescription, diagnose
from cluster.host_description import read_host_description
from deployments.config import STORE_VARIABLE, UNNAMED_STORE
from deployments.terminal.command_line import FAILED, OK
from deployments.terminal.console import add_json_option

_MARKS = {"ok": " ", "note": "-", "problem": "!"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, help=CONFIG_HELP)
    # Not `add_store_option`: without the option, a config that cannot be read is a finding.
    parser.add_argument(
        "--store",
        dest="named_store",
        type=Path,
        metavar="DIR",
        help=f"default: as in the config, else ${STORE_VARIABLE}, else {UNNAMED_STORE}",
    )
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Return FAILED if a finding has the level `problem`, else OK."""
    host = read_host_description(find_config(arguments.config), arguments.named_store)
    findings = diagnose(host)
    print(format_json(host, findings) if arguments.json else format_findings(findings))
    problems = sum(finding.level == "problem" for finding in findings)
    if problems and not arguments.json:
        print(f"\n{problems} to fix, marked with !", file=sys.stderr)
    return FAILED if problems else OK


def format_findings(findings: Iterable[Finding]) -> str:
    """Format the lines of each finding: the fact, its meaning, the action."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.level]} {finding.name:<10} {finding.found}")
        lines.append(f"  {'':<10} {finding.meaning}")
        if finding.action:
            lines.append(f"  {'':<10} -> {finding.action}")
    return "\n".join(lines)


def format_json(host: HostDescription, findings: Sequence[Finding]) -> str:
    content = {"host": asdict(host), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=1, default=str)
