"""Weights out: a folder that transformers loads, with a modelling file that needs torch and transformers alone."""
