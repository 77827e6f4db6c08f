"""rpc-pipe: pipeline-parallel training in which a schedule is a relation and workers pull."""

__version__ = "0.1.0"
