"""``python -m rollout``: the command line."""

import sys

from rollout.cli import main

if __name__ == "__main__":
    sys.exit(main())
