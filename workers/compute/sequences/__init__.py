"""Slices of sequences."""
