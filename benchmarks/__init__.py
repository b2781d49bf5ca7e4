"""Benchmarks with seeded random inputs. `hundredfold bench --help` lists them."""
