"""What a score head tells apart, as ``config.json`` says."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.errors import ConfigError
from rollout.models.config.reader import Reader

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
_DEFAULT = 2  # labels of a file that says nothing: transformers writes down others alone


def read_labels(read: Reader) -> tuple[tuple[str, ...], str]:
    """The names of the labels by index, and the ``problem_type``, "" where there is none."""
    problem = read.values.get("problem_type") or ""
    if problem not in ("", *PROBLEM_TYPES):
        raise ConfigError(
            f"{read.file}: problem_type {problem!r} is not one of {', '.join(PROBLEM_TYPES)}"
        )
    names = read.values.get("id2label")
    if names is None:
        count = read.count("num_labels", _DEFAULT)
        return tuple(f"LABEL_{index}" for index in range(count)), problem
    keys = sorted(map(str, names)) if isinstance(names, Mapping) else []
    if not keys or keys != sorted(map(str, range(len(keys)))):
        raise ConfigError(
            f"{read.file}: id2label must name the labels 0, 1, ... , got {str(names)[:200]}"
        )
    return tuple(str(names[str(index)]) for index in range(len(keys))), problem
