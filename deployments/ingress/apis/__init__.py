"""One API per module or package: each translates, none computes."""
