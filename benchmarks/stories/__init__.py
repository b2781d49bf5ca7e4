"""Stories: benchmarks that measure the gain of each technique of this project."""
