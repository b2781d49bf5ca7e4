"""Text generation: jobs (one per answer), sampling, KV slots and the scheduler of one decoder."""
