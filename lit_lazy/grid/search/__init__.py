"""Searches for good values of continuous options: a grid whose cells are drawn late."""
