"""``python -m rollout``: the command line."""

import sys

if __name__ == "__main__":
    try:
        from rollout.cli.main import main

        status = main()
    except KeyboardInterrupt:  # while modules are still imported
        status = 130
    sys.exit(status)
