"""The decoder language model, generation, loss and export. Needs only torch."""
