"""Commands of `hundredfold models` that need no compiler; `build_artifacts` has the others."""
