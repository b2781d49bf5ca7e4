"""What an evaluation can refuse."""

from __future__ import annotations

from build_artifacts.errors import BuildError


class BadEvaluationData(BuildError):
    """A file of labelled examples that cannot be used; the message names file, line and field."""

    code = "bad_evaluation_data"
