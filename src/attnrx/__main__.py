"""Runs the command line as a module: `python -m attnrx shrink ...`, `accelerate launch -m attnrx train ...`."""

import sys

from attnrx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
