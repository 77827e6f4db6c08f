"""`python -m rpc_pipe` is `rpc-pipe`."""

import sys

from .commands.main import main

if __name__ == "__main__":
    sys.exit(main())
