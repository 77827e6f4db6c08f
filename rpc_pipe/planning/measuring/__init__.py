"""What a plan needs to know of a model and of a machine, measured."""
