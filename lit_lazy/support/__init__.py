"""What every room may use: files, errors, checks, and where a result was made. Knows nothing of the field."""
