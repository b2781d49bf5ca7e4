"""Which candidate is right and fastest on this host: measured, kept, chosen."""
