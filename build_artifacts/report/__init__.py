"""The report: what every stage between the original checkpoint and the served graph gains.

setting.py    what a report was measured on; equal settings need no second measurement
origin.py     the checkpoint an artifact was made from, found again
stages.py     what is measured, in order
race.py       passes in interleaved blocks, their mean and spread
travel.py     all of it, from an artifact to a Report
figures.py    the Report, and the arithmetic of its ratios
rendering.py  columns for a terminal, Markdown
plot.py       PNG and SVG
keeping.py    where all of this lies in the store
"""
