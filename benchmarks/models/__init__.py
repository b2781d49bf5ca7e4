"""Thousands of models behind two encoder replicas."""
