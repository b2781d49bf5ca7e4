"""Worker process that runs cases of one part. `command.py` can kill it and start another.

`python -m benchmarks.gpu.worker PART JSON` writes a line of JSON when a case starts, and a line
with its result when it ends. Output of libraries goes to stderr. The caller removes the directory
`scratch`, to which the cases write.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from benchmarks.gpu.cases import Bench, Target, index_by_name, run_case
from benchmarks.gpu.device import release_memory
from benchmarks.gpu.parts import PARTS

# Libraries must not contact a model hub or print progress bars.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_part(part: str, names: list[str], bench: Bench, write: Any) -> None:
    """Run the cases `names` of `part`. Pass each start and each result to `write`.

    On a GPU, return after a failed case, because an error of CUDA may make all later CUDA calls of
    the process fail.
    """
    cases = index_by_name(PARTS[part].cases(bench.target))
    for name in names:
        write({"started": name})
        result = run_case(part, cases[name], bench)
        write({"result": asdict(result)})
        if bench.target.is_cuda and result.state == "failed":
            return
        release_memory(bench.target)


def main() -> int:
    os.environ.update(_ENVIRONMENT)
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # so that output of libraries does not mix with results
    part, request = sys.argv[1], orjson.loads(sys.argv[2])
    smollm = request["target"].pop("smollm")
    target = Target(**request["target"], smollm=Path(smollm) if smollm else None)
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE

    def write(line: Any) -> None:
        lines.write(orjson.dumps(line, default=str, option=options))

    run_part(part, request["cases"], Bench(target, Path(request["scratch"])), write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
