"""Seeded benchmarks; see `hundredfold bench --help`."""
