"""The command line: `python -m build_artifacts COMMAND`, one of the commands in `options.py`.

Results go to stdout, progress and errors to stderr; a failure that was foreseen exits with 1.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from build_artifacts import commands
from build_artifacts.errors import BuildError
from build_artifacts.options import parser
from deployments.errors import ServeError

_BUILD_TOOLS = ("torch", "transformers", "safetensors", "peft", "onnx", "onnxscript", "onnxruntime",
                "huggingface_hub", "tokenizers", "onnx_ir", "tqdm", "matplotlib", "gguf",
                "onnxruntime_genai")  # fmt: skip
_STORE_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

_COMMANDS = {
    "build": commands.build_model,
    "show": commands.show,
    "demo": commands.demo,
    "tune": commands.tune,
    "verify": commands.verify,
    "report": commands.report,
    "compact": commands.compact,
    "gc": commands.gc,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = parser().parse_args(argv)
    try:
        return _COMMANDS[arguments.command](arguments)
    except BuildError as exc:
        return _refuse(exc.message, exc.hint)
    except ServeError as exc:
        return _refuse(exc.message, "look at the store with `python -m build_artifacts show`")
    except ModuleNotFoundError as exc:
        if exc.name not in _BUILD_TOOLS:
            raise
        return _refuse(
            f"`{exc.name}` is not installed", "run `pip install 'hundredfold[build,cpu]'`"
        )
    except OSError as exc:
        if exc.errno not in _STORE_FULL:
            raise
        hint = f"check space and permissions of {arguments.store}; run it again to go on"
        return _refuse(str(exc), hint)
    except KeyboardInterrupt:
        hint = "run the command again; a build goes on after its last finished step"
        return _refuse("interrupted", hint, status=130)


def _refuse(message: str, hint: str, status: int = 1) -> int:
    print(f"error: {message}\n\nhint: {hint}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
