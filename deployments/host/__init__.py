"""The host and this process on it: cores, memory, GPUs, priorities."""
