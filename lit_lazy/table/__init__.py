"""A finished table: its records, the statistics behind them, and how it is shown."""
