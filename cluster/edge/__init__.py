"""The edge of a host: its HAProxy, which outlives the Serve actor that configures it."""
