"""Boards of workers: how they are written, found and read, and the view of a run."""
