"""Runs the command line as a module, for launchers: `accelerate launch -m attnrx.cli train ...`."""

import sys

from attnrx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
