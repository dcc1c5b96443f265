"""The command line: the options of each command and its action together."""
