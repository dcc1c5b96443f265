"""Export to a folder that transformers loads, with a modelling file that needs only torch and transformers."""
