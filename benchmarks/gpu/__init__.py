"""The GPU benchmark `hundredfold bench gpu`: measurements on a GPU, in parts of a few minutes."""
