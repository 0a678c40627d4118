"""The command line, as ``rollout`` and as ``python -m rollout``."""

import sys


def main() -> int:
    try:
        from rollout.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while modules are still imported
        return 130


if __name__ == "__main__":
    sys.exit(main())
