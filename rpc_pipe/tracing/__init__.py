"""Observation of runs: boards, records, traces, and causes of lost time."""
