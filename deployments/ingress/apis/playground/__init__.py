"""The playground: a web page to try and manage the models."""
