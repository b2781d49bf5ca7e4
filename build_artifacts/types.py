"""Type aliases and numbers that several parts of the compiler share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
Tokens = tuple[int, ...]  # token ids of one text
TorchTensor = Any  # a torch.Tensor; the library is not typed

MAX_INT8 = 127  # symmetric quantization does not use -128
