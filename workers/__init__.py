"""One worker actor per device: a pure state machine, the shard's compute, the outbox, the transports.

This module imports nothing, so that `workers.state` loads without torch, as the simulator needs.
"""
