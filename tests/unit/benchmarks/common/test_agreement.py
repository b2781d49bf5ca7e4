from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.agreement import CosineCheck, require_agreement
from benchmarks.common.errors import BenchmarkError


def test_the_worst_row_decides() -> None:
    one = np.array([[1.0, 0.0], [0.0, 1.0]])
    other = np.array([[1.0, 0.0], [1.0, 1.0]])
    agreement = CosineCheck.of("a and b", one, other, 0.9)
    assert agreement.worst_cosine == pytest.approx(0.5**0.5)
    assert not agreement.holds
    with pytest.raises(BenchmarkError, match=r"a and b: worst cosine 0\.7071 of 2"):
        require_agreement([CosineCheck.of("equal", one, one, 0.999), agreement])


def test_comparing_nothing_is_no_agreement() -> None:
    empty = np.empty((0, 4))
    assert not CosineCheck.of("nothing", empty, empty, 0.0).holds
