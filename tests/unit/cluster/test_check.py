"""`hundredfold check` prints the problems of a config. Its exit code tells if there are any."""

from pathlib import Path

import pytest

from cluster.__main__ import main
from tests.support.checked_configs import CONFIG


def test_check_prints_file_line_path_and_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    app = "{name: a, route_prefix: /, import_path: 'shop:app'}"
    config.write_text(f"http_options:\n  port: 8000\n  hots: localhost\napplications: [{app}]\n")
    assert main(["check", str(config)]) == 1
    assert capsys.readouterr().out == (
        f"{config}:3: http_options.hots: unknown key `hots`; did you mean `host`?\n"
    )


def test_check_returns_zero_without_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(CONFIG)]) == 0
    assert capsys.readouterr().out == f"{CONFIG}: no problems\n"


def test_check_of_missing_file_prints_error_and_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "none.yaml")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot read")
    assert "\n\nhint: " in error
