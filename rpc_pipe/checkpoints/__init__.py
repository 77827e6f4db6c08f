"""Checkpoints of a training run, so that it resumes anywhere: with any number of workers, cut and schedule."""
