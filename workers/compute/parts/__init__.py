"""Parts of weights: of members of a worker, and of owners among replicas."""
