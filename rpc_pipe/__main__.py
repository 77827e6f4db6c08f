"""`python -m rpc_pipe` is `rpc-pipe`. The launcher starts workers by this file's path.

Python imports first from the folder of a script, or with `-m` from the current folder. A worker must import from
neither: a `zmq.py` in a shared folder would run in it as the user.
"""

import sys
from importlib import import_module
from pathlib import Path

if not __package__:  # by path: import the package that this file belongs to, not another one named rpc_pipe
    __package__ = "rpc_pipe"
    if sys.path[0] == str(Path(__file__).parent):  # not so with PYTHONSAFEPATH
        del sys.path[0]
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import_module(__package__)
    del sys.path[0]

try:
    from .commands.main import main
except KeyboardInterrupt:  # Ctrl-C before there was anything to stop
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
