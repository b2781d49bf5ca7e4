"""Parts that several APIs share: context, headers, error formats, bodies and model lists."""
