"""Devices, and how payloads travel between two of them."""
