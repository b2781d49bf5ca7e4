"""Graphs of models that generate, written operator by operator from a checkpoint's weights."""
