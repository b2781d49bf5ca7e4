"""The Serve config of commands that get none."""

from __future__ import annotations

from pathlib import Path

CONFIG_NAME = "serve_config.yaml"
_PACKAGE = Path(__file__).parent
# A wheel ships the file in this package; a checkout has it in its root.
_SHIPPED = (_PACKAGE / CONFIG_NAME, _PACKAGE.parent / CONFIG_NAME)
CONFIG_HELP = f"default: {CONFIG_NAME} of the working directory, else the one that is installed"


def find_config(config: Path | None) -> Path:
    """Return `config`, else the file of the working directory, else the installed one."""
    own = Path(CONFIG_NAME)
    if config is not None or own.exists():
        return config or own
    return next((path for path in _SHIPPED if path.is_file()), own)
