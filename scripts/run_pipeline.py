#!/usr/bin/env python
"""The launcher as a script: the same as `rpc-pipe run`; see `--help`."""

import sys

from rpc_pipe.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
