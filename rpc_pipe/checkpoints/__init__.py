"""Checkpoints of a training run, so that it goes on anywhere: with any number of workers, cut and schedule."""
