"""The decoder language model, generation and loss, which need only torch; import and export."""
