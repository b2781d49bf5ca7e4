"""Rare garbage collection in replicas: frequent collections would find nothing.

Requests leave no reference cycles. But the objects of 64 requests in flight exceed Python's usual
threshold of 700 objects, so the collector ran 70 times per second: a tenth of the ingress's CPU
time. It must still run, because errors keep cycles in their tracebacks.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 10_000  # new objects between two collections


def collect_rarely() -> None:
    """Collect after NEW_OBJECTS new objects, and never traverse the objects that exist now.

    Call after the imports: imported modules are most objects of a process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
