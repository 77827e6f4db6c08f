"""The cost of a schedule, before anything runs. Loads without torch, but for measuring."""
