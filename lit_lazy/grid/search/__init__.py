"""Searches for good values of continuous options: a queue whose cells are drawn late."""
