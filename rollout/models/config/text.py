"""The text model within a multimodal checkpoint: what its configuration says, and its names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rollout.errors import ConfigError
from rollout.models.arch import Arch

# As files have it, and as transformers 5 has it in memory. What encodes images is known, not kept.
PREFIXES: Mapping[str, str] = MappingProxyType(
    {
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
        "model.visual.": "visual.",
        **{
            f"{within}{part}.": ""
            for within in ("", "model.")
            for part in ("vision_tower", "vision_model", "multi_modal_projector")
        },
    }
)
_OUTER = ("architectures", "quantization_config", "eos_token_id", "tie_word_embeddings")


def text_config(values: Mapping[str, Any], arch: Arch, file: str) -> tuple[Arch, Mapping[str, Any]]:
    """The declaration and the plain config of the text model that ``values`` nest.

    Releases leave out what transformers' class has as a default, which is taken from there. What
    the outer config says of files, ids and the head goes before. Raises ``ConfigError``.
    """
    if arch.texts is None:
        return arch, values
    values = whole_config(values, arch, file)
    nested = values.get("text_config")
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{file}: field 'text_config' is missing; the text model needs it")
    kind = nested.get("model_type") or next(iter(arch.texts))
    if not isinstance(kind, str) or kind not in arch.texts:
        raise ConfigError(
            f"{file}: text_config.model_type {kind!r} is not one of {', '.join(arch.texts)}"
        )
    text = parsed_config(nested, kind, f"{file}: text_config")
    outer = {name: values[name] for name in _OUTER if values.get(name) is not None}
    dtype = next(
        (of[key] for of in (values, nested) for key in ("dtype", "torch_dtype") if of.get(key)),
        None,
    )
    return arch.texts[kind], {**text, **outer, "dtype": dtype}


def whole_config(values: Mapping[str, Any], arch: Arch, file: str) -> Mapping[str, Any]:
    """``values`` with the text's fields in ``text_config``, where older files have none."""
    if arch.vision is None or values.get("text_config") is not None:
        return values
    return {**values, "text_config": parsed_config(values, arch.vision.kind, file)["text_config"]}


def parsed_config(values: Mapping[str, Any], kind: str, file: str) -> dict[str, Any]:
    """What transformers makes of a config of ``model_type`` ``kind``; raises ``ConfigError``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        found: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(dict(values)).to_dict()
    except Exception as error:
        raise ConfigError(f"{file}: transformers refuses it: {str(error)[:300]}") from error
    return found
