"""Payloads, and the carriers that bring them from worker to worker."""
