"""Reports on results: tables and pages of ablations, searches and questions, diagnoses of checkpoints."""
