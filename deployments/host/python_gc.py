"""Rare garbage collection in replicas, because most collections would find nothing.

Successful requests leave no reference cycles. But the objects of 64 requests in flight exceed
Python's default threshold of 700 objects. With this threshold, the collector ran 70 times per
second and took a tenth of the ingress's CPU time. Some collections are needed, because tracebacks
of errors form cycles. These may hold the bodies of requests, and the collector counts objects, not
bytes. Code that answers an error therefore calls `forget_frames` (errors.py).
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 10_000  # new objects between two collections


def collect_rarely() -> None:
    """Collect after NEW_OBJECTS new objects, and never traverse the objects that exist now.

    Call this after the imports, because most objects of a process belong to imported modules.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
