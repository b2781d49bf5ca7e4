"""Default Serve config for commands that are called without a config."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_NAME = "serve_config.yaml"
_PACKAGE = Path(__file__).parent
# A wheel has the file in this package. A checkout has the file in its root.
_SHIPPED = (_PACKAGE / CONFIG_NAME, _PACKAGE.parent / CONFIG_NAME)
CONFIG_HELP = f"default: {CONFIG_NAME} of the working directory, else the one that is installed"


def find_config(config: Path | None) -> Path:
    """Return `config`, else CONFIG_NAME in the working directory, else the shipped file.

    The result may not exist: `config` is not checked, and a damaged installation has no shipped
    file. The caller reports the error when it reads the file.
    """
    own = Path(CONFIG_NAME)
    # Unlike `Path.exists`, this returns False in a directory that the user may not enter.
    if config is not None or os.path.exists(own):
        return config or own
    return next((path for path in _SHIPPED if path.is_file()), own)
