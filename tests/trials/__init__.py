"""Trials from outside that have no end of their own: random models, faults, malformed input, strangers, long runs."""
