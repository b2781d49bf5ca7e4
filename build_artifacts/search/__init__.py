"""The search: what is compared, with what, how fast, and who passes."""
