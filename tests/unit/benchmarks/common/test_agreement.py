from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.agreement import CosineCheck, require_agreement
from benchmarks.common.errors import BenchmarkError


def test_require_agreement_reports_the_worst_row() -> None:
    left = np.array([[1.0, 0.0], [0.0, 1.0]])
    right = np.array([[1.0, 0.0], [1.0, 1.0]])
    check = CosineCheck.compare("a and b", left, right, 0.9)
    assert check.worst_cosine == pytest.approx(0.5**0.5)
    assert not check.is_met
    with pytest.raises(BenchmarkError, match=r"a and b: worst cosine 0\.7071 of 2"):
        require_agreement([CosineCheck.compare("equal", left, left, 0.999), check])


def test_check_without_vectors_is_not_met() -> None:
    empty = np.empty((0, 4))
    assert not CosineCheck.compare("nothing", empty, empty, 0.0).is_met
