"""Fields of a ``config.json`` that a user replaces (``hf_overrides``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import ConfigError
from rollout.wire.spellings import near

# What is read of any config, whatever transformers' class for it declares.
_ALWAYS = frozenset(
    (
        *("architectures", "model_type", "dtype", "quantization_config"),
        *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
        *("is_causal", "use_bidirectional_attention"),
    )
)
_ROPE = ("rope_theta", "rope_scaling")
_TEXT = "text_config"


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with fields replaced; an object in the place of another replaces its fields.

    ``ConfigError`` for a name that nothing reads, in the config or in its ``text_config``. What
    earlier files say of rope at the top goes into ``rope_parameters`` where there are such.
    """
    if not overrides:
        return dict(values)
    _check_known(values, overrides, "")
    return _replaced(values, _with_rope(values, overrides))


def _replaced(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for name, value in overrides.items():
        held = found.get(name)
        both = isinstance(held, Mapping) and isinstance(value, Mapping)
        found[name] = _replaced(held, value) if both else value  # type: ignore[arg-type]
    return found


def _with_rope(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``overrides`` as a config with ``rope_parameters`` has them, also within its texts'."""
    found, rope = dict(overrides), values.get("rope_parameters")
    inner, theirs = values.get(_TEXT), found.get(_TEXT)
    if isinstance(inner, Mapping) and isinstance(theirs, Mapping):
        found[_TEXT] = _with_rope(inner, theirs)
    given = [name for name in _ROPE if name in found]
    if not isinstance(rope, Mapping) or not given:
        return found
    if any(isinstance(value, Mapping) for value in rope.values()):
        kinds = ", ".join(f"{kind!r}: {{...}}" for kind in rope)
        raise ConfigError(
            f"hf_overrides: {given[0]!r} is said by layers here: "
            f"{{'rope_parameters': {{{kinds}}}}} says of which"
        )
    scaling = dict(found.pop("rope_scaling", None) or {})
    if "rope_theta" in found:
        scaling["rope_theta"] = found.pop("rope_theta")
    found["rope_parameters"] = {**scaling, **dict(found.get("rope_parameters") or {})}
    return found


def _check_known(values: Mapping[str, Any], overrides: Mapping[str, Any], within: str) -> None:
    inner, theirs = values.get(_TEXT), overrides.get(_TEXT)
    if isinstance(inner, Mapping) and isinstance(theirs, Mapping):
        _check_known(inner, theirs, f"{_TEXT}.")
    unknown = [name for name in overrides if name not in values and name not in _ALWAYS]
    if not unknown or (declared := _declared(values.get("model_type"))) is None:
        return
    for name in unknown:
        if name not in declared:
            texts = inner if isinstance(inner, Mapping) else {}
            known = near(name, [*values, *declared, *_ALWAYS])
            hint = f"; did you mean {known!r}?" if known else ""
            if name in texts or name in (_declared(texts.get("model_type")) or ()):
                hint = f"; it is one of text_config's: {{'text_config': {{{name!r}: ...}}}}"
            raise ConfigError(f"hf_overrides: {within}{name} is no field of this model{hint}")


def _declared(kind: object) -> frozenset[str] | None:
    """The fields that transformers' class for a ``model_type`` has; None where there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # slow to import

    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    made = CONFIG_MAPPING[kind]
    try:
        fields = made().to_dict()
    except Exception:  # noqa: BLE001 - code of others; one that has no defaults
        return None
    settable = [name for name in dir(made) if isinstance(getattr(made, name, None), property)]
    return frozenset((*fields, *settable, *made.attribute_map, *made.attribute_map.values()))
