"""Everything that depends on MLflow: runs, the metric file behind them, saved views, databases, the server."""
