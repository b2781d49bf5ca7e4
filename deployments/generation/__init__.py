"""Text generation: jobs, sampling, KV slots and the scheduler of one decoder."""
