"""What carries payloads between workers, and the payloads themselves."""
