"""Code that two or more benchmarks share: load, engines, timing, statistics and result files."""
