"""The command line `hundredfold`: the commands of cluster, compiler and benchmarks in one tree."""
