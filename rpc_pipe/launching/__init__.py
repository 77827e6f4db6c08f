"""Processes: who this one is, who started it, how workers are started."""
