"""The edge of a host: an HAProxy that outlives the Serve actor that configures it."""
