"""A byte-level GPT on real text: what the demo trains."""
