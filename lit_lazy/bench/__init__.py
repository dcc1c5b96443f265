"""What things cost: measurements of speed and memory."""
