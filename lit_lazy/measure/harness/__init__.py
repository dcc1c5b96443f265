"""What needs lm-evaluation-harness, an extra, to be defined at all; its absence is one line."""
