"""Everything that depends on MLflow: runs, saved views, databases, the server."""
