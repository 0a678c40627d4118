"""What the ``config.json`` of an EAGLE-3 head says, whoever trained it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from rollout.errors import ConfigError
from rollout.models.config.model import ModelConfig
from rollout.models.config.reader import Reader

_READS = "eagle_aux_hidden_state_layer_ids"
# Of transformers' LlamaConfig: speculators writes what differs from it alone.
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """``layer``: of its one decoder layer, which is Llama's but for what it reads. ``reads``: as of
    ``PredictionHead``, none where the file is mute.

    Norms beside the layer's own: ``input_norm`` of all that is read, ``fc_norm`` of each state by
    itself. ``norm_first``: what the layer adds to is the state behind its norm. ``norm_output``:
    what goes on to the next token is behind the last norm.
    """

    layer: ModelConfig
    reads: tuple[int, ...]
    input_norm: bool
    fc_norm: bool
    norm_first: bool
    norm_output: bool

    @classmethod
    def read(cls, values: Mapping[str, Any], file: str) -> Self:
        """Of SpecForge's and SGLang's layout, or of speculators', which has the layer's fields in
        ``transformer_layer_config``. Raises ``ConfigError``, also for what does not run here.
        """
        nested = values.get("transformer_layer_config")
        layer = {**_LLAMA, **nested} if isinstance(nested, Mapping) else values
        eagle = values.get("eagle_config")
        told = {**eagle, **values} if isinstance(eagle, Mapping) else values
        kind = values.get("speculators_model_type") or "eagle3"
        if kind != "eagle3" or told.get("use_aux_hidden_state") is False:
            raise ConfigError(f"{file}: it is of another kind than EAGLE-3, whose heads run alone")
        if (kind := layer.get("model_type", "llama")) != "llama":
            raise ConfigError(
                f"{file}: model_type is {kind!r:.80}, and heads of a Llama layer run alone"
            )
        if (count := layer.get("num_hidden_layers", 1)) != 1:
            raise ConfigError(f"{file}: num_hidden_layers is {count!r:.80}, and one layer runs")
        return cls(
            layer=_read_layer(layer, file),
            reads=_reads(values, eagle, file),
            input_norm=bool(told.get("norm_before_fc")),
            fc_norm=bool(told.get("fc_norm")),
            norm_first=bool(told.get("norm_before_residual", nested is not None)),
            norm_output=bool(told.get("norm_output")),
        )


def _read_layer(layer: Mapping[str, Any], file: str) -> ModelConfig:
    values = {
        **layer,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    config = ModelConfig.from_hf(values, file=file)
    types = layer.get("layer_types")
    slides = types == ["sliding_attention"] if types else layer.get("use_sliding_window")
    if not slides or layer.get("sliding_window") is None:
        return config
    window = Reader(layer, file).count("sliding_window")
    return replace(config, layers=(replace(config.layers[0], window=window),))


def _reads(values: Mapping[str, Any], eagle: Any, file: str) -> tuple[int, ...]:
    """At the top, as vLLM and speculators have them, the numbers are those of ``HiddenPages``; in
    ``eagle_config``, as SGLang has them, of the layers that make the states.
    """
    found, ahead = values.get(_READS), 0
    if not found and isinstance(eagle, Mapping):
        found, ahead = eagle.get(_READS), 1
    found = found or []
    if not isinstance(found, list) or not all(type(number) is int for number in found):
        raise ConfigError(f"{file}: {_READS} must be a list of integers, got {found!r:.80}")
    return tuple(sorted(number + ahead for number in found))
