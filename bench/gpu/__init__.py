"""Proves a device by one command, `scripts/gpu`: tables first, then checks, each part with its own limit."""
