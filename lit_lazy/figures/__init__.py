"""Figures of tables, trainings and diagnostics in one style."""
