"""Import of language models from their published files."""
