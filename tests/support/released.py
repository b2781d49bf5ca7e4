"""What the last release wrote, so that a change of it needs a new version.

A release sets these values to those of its code.
"""

VERSION = "0.1.0"
WIRE_VERSION = 0  # had no channels
SCHEMA = 1  # of manifests
