"""Replay of a day against the choice of the hardware."""
