"""The edge of a host: an HAProxy that keeps running if the Serve actor that configures it ends."""
