"""The command line of all packages: subcommands, tables, progress."""
