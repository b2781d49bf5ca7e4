"""Build steps: functions from files to files."""
