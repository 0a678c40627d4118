"""``python -m rollout.engine.structured``: see ``grammar_process``."""

import gc


def main() -> None:
    gc.disable()  # until all is imported
    from rollout.engine.structured.grammar_process import main as run

    run()


if __name__ == "__main__":
    main()
