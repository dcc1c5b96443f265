"""The command line: one file per command, its parser and its action together."""
