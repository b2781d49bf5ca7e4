"""Models that generate text: how their graphs are made, judged, measured and described."""
