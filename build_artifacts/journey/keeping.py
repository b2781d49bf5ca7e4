"""Reports in the store, beside the cost tables of their host: outside of what is sealed.

<version>/hosts/<fingerprint>/report.json, report.md, report.png, report.svg
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from build_artifacts.journey.figures import Report
from build_artifacts.journey.plot import draw
from build_artifacts.journey.rendering import markdown
from build_artifacts.journey.setting import Setting
from deployments.store import HOSTS_NAME
from deployments.tuning.host import Host

STEM = "report"

Tell = Callable[[str], None]  # one line for people


def report_path(artifact: Path, host: Host) -> Path:
    """The report.json of `host`."""
    return artifact / HOSTS_NAME / host.fingerprint / f"{STEM}.json"


def stored_report(artifact: Path, setting: Setting, tell: Tell) -> Report | None:
    """The report that still holds in `setting`; None, telling why, where it has to be measured."""
    path = report_path(artifact, setting.host)
    try:
        report = Report.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as exc:
        tell(f"measuring again: {path} cannot be used: {str(exc).splitlines()[0]}")
        return None
    if changed := _changed(report.setting, setting):
        tell(f"measuring again: not the {', '.join(changed)} of the stored report")
        return None
    if report.unmeasured:
        tell(f"measuring again: the stored report lacks {', '.join(report.unmeasured)}")
        return None
    return report


def _changed(then: Setting, now: Setting) -> list[str]:
    return [name for name in Setting.model_fields if getattr(then, name) != getattr(now, name)]


def keep(artifact: Path, report: Report, tell: Tell) -> Path:
    """Write the report in all its forms; the path of report.json, which is written last.

    Each file is whole or not there. Without matplotlib there are no pictures. Raises OSError.
    """
    path = report_path(artifact, report.setting.host)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = _pictures(report, tell)
    plot = f"{STEM}.svg" if pictures else None
    for form, content in pictures.items():
        _write(path.with_suffix(f".{form}"), content)
    _write(path.with_suffix(".md"), markdown(report, plot=plot).encode())
    _write(path, report.to_json())
    return path


def _pictures(report: Report, tell: Tell) -> Mapping[str, bytes]:
    try:
        return draw(report)
    except ModuleNotFoundError as exc:
        if exc.name != "matplotlib":
            raise
        tell("no plot: `matplotlib` is not installed; `pip install 'hundredfold[build]'` adds it")
        return {}


def _write(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
