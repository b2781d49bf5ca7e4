"""Training of the models and adapters in this repository, and their gate data.

`python -m build_artifacts.training.NAME --help` describes a program. The build commands and the
server do not import this package.
"""
