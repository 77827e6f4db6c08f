"""A worker's computation: shards, backward in two, random numbers, the device."""
