"""The engine of `rpc-pipe verify`: a pipeline compared with one process, bit for bit."""
