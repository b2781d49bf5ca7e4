"""Recipes of the weights in this package: `python -m build_artifacts.training.NAME --help`.

Neither builds nor the server import them.
"""
