"""Literals of JSON and Python in the calls that models write."""

from __future__ import annotations

import re

JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
# Words of JSON, and those of Python that models write in their place.
JSON_WORDS = {
    "true": "true", "false": "false", "null": "null", "True": "true", "False": "false",
    "None": "null",
}  # fmt: skip
MAX_DEPTH = 100  # of lists and objects in each other
