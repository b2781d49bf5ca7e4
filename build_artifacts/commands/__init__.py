"""Commands of the compiler, a module each. They import the compiler only when they run."""
