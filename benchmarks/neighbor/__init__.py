"""Benchmark of a quiet client beside a loud one."""
