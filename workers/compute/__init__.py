"""What a worker computes: shards, backward in two, random numbers, the device."""
