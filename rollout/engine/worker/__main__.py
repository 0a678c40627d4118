"""``python -m rollout.engine.worker``: see ``rank_process``."""

import gc


def main() -> None:
    gc.disable()  # what modules make stays: searches for garbage are a fifth of their import
    from rollout.engine.worker.rank_process import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
