"""Tables of the documents, from result files and from the code."""
