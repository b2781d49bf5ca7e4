"""Report of a build: size, accuracy, latency and throughput of every stage.

values.py   the report, its conditions and its speed-ups
rebuild.py  the model of an artifact, built again
stages.py   the stages from the checkpoint to the served graph
measure.py  interleaved measurement and accuracy of all stages
output.py   tables, Markdown, plots and the stored report
build.py    from an artifact to its report
"""
