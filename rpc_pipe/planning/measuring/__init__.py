"""Measurements of a model and of a machine, for plans."""
