"""The command line `hundredfold`: one tree over serving, compiler, cluster and benchmarks."""
