"""What modules hold, draw and write, and the private names of torch."""
