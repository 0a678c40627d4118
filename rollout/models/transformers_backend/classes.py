"""Which class of transformers, of a user's or of a checkpoint's own code an architecture is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import ConfigError
from rollout.models.transformers_backend.remote_code import MODEL, RemoteCode, auto_map


def load_class(
    values: Mapping[str, Any],
    architecture: str,
    code: RemoteCode | None = None,
    file: str = "config.json",
) -> tuple[type[Any], Any]:
    """The class of an architecture, and its config; ``ConfigError`` where nobody has it.

    ``code``: leave to run the checkpoint's own; ``file`` only names it in errors.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if architecture.endswith("ForSequenceClassification"):
        raise ConfigError(f"{architecture}: score heads are served over native decoders alone")
    known = getattr(transformers, architecture, None) if architecture in _causal_names() else None
    kind = known or _registered(architecture)
    if kind is None:
        if code is not None and auto_map(values):
            kind, config_kind = code.classes(values)
            return kind, config_kind.from_dict(dict(values))
        own = (
            f"; its own code lies with it ({auto_map(values)[MODEL]}), and is run with "
            "trust_remote_code=True alone"
            if MODEL in auto_map(values)
            else ""
        )
        raise ConfigError(
            f"{architecture}: transformers {transformers.__version__} has no such model{own}"
        )
    model_type = str(values.get("model_type") or kind.config_class.model_type)
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"{file}: transformers knows no model_type {model_type!r}")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(_with_floats(values))
    except Exception as error:
        raise ConfigError(f"{file}: transformers refuses it: {str(error)[:300]}") from error
    return kind, config


def _registered(architecture: str) -> type[Any] | None:
    """A class that somebody made known by ``AutoModelForCausalLM.register``: a user's module map,
    or a package that it imports.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    own = MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values()
    return next((kind for kind in own if kind.__name__ == architecture), None)


def _with_floats(value: Any) -> Any:
    """JSON has no infinity; transformers writes one as an object."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _causal_names() -> set[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found = NAMES.values()
    return {each for names in found for each in ([names] if isinstance(names, str) else names)}
