"""All that knows MLflow: runs, the spool that feeds them, saved views, databases, the server."""
