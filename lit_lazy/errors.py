"""What a command can end with, beside success. Wrong input is a ValueError: one line, exit status 2."""


class UnfinishedError(RuntimeError):
    """Work that could not be finished, for a reason outside the input: one line, exit status 1."""
