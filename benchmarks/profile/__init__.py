"""CPU time and wake-ups of the processes of a server under load."""
