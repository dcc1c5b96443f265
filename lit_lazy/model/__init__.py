"""The decoder language model around attention, and its loss. Needs torch alone."""
