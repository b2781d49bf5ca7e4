"""HTTP APIs, one package each: they parse requests and build responses; they compute nothing."""
