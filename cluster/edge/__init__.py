"""The edge of a host: an HAProxy that survives the end of the Serve actor that configures it."""
