"""What a schedule costs, before anything runs. Loads without torch, but for measuring."""
