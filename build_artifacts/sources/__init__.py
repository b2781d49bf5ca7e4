"""Sources of checkpoints: one module for each form of SOURCE, the argument of `build`.

The module `tokenizer` completes the tokenizer of any source.
"""
