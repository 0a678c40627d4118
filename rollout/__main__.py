"""The command line, as ``rollout`` and as ``python -m rollout``."""

import gc
import sys


def main() -> int:
    try:
        gc.disable()  # what modules make stays: searches for garbage are a fifth of their import
        from rollout.cli.main import main as run

        gc.freeze()
        gc.enable()
        return run()
    except KeyboardInterrupt:  # while modules are still imported
        return 130


if __name__ == "__main__":
    sys.exit(main())
