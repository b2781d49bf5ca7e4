"""Check of the variants that tuning selects."""
