"""The demo's model and data: a byte-level GPT on real text."""
