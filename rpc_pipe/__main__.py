"""`python -m rpc_pipe` is `rpc-pipe`."""

import sys

try:
    from .commands.main import main
except KeyboardInterrupt:  # Ctrl-C before there was anything to stop
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
