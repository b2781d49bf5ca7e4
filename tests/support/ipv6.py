"""Mark of tests that need IPv6."""

from __future__ import annotations

import pytest

from cluster.ports import is_port_free


def _has_ipv6() -> bool:
    try:
        return is_port_free("::1", 0)
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6")
