"""HTTP in, JSON out: one file per API family, and what they share."""
