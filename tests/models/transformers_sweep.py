"""Every causal model of the installed transformers at tiny size: who serves it, and how well.

    python tests/models/transformers_sweep.py [MODEL_TYPE ...]

prints a row for each: natively | by transformers | not, and why. A model counts when it loads, when
its logprobs over pages equal transformers' own (1e-4), and when an update from its module, under
the names that it has in memory, makes the instance that its files would, bit for bit. Of those that
transformers' modules serve: by whose plan, and whether, two ranks say what one does (1e-4, and the
same tokens greedily), from the files and after that update.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rank_threads import Session, run_ranks
from tiny_models import randomize
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout.distributed import TensorParallel
from rollout.errors import RolloutError
from rollout.loader import open_checkpoint
from rollout.models.build import build_model, build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.model import Model
from rollout.models.weight_io.table import check_tables
from rollout.weight_sync.protocol.fit import check_metadata
from rollout.weight_sync.source import WeightSource
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights import TensorMeta
from rollout.weights.wanted import WantedWeights, by_name

# Of the fields that a config class has, whichever name it gives them.
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "ffn_dim": 48,
    "max_position_embeddings": 128, "word_embed_proj_dim": 64, "sliding_window": 6,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "moe_topk": 2, "expert_ffn_hidden_size": 16,
    "intermediate_size_mlp": 48, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_n_groups": 1,
    "mamba_d_state": 12, "shared_intermediate_size": 24, "num_heads": 4, "patch_size": 8,
    "image_size": 16, "laurel_rank": 8, "default_language": "en_XX", "zero_expert_num": 2,
    "pronunciation_vocab_size": 9, "pronunciation_embed_dim": 8, "shape_vocab_size": 9,
    "shape_embed_dim": 8, "num_dense_layers": 1, "n_heads": 4, "n_layers": 2, "num_layers": 2,
    "ffn_hidden_size": 48, "max_seq_len": 128, "index_topk": 6, "index_n_heads": 16,
    "index_head_dim": 16,
}  # fmt: skip
# Of a type alone: what its config class does not derive of its other fields.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 1},
    "cpmant": {"dim_head": 16, "dim_ff": 48, "position_bias_num_buckets": 8, "prompt_length": 4},
    "phi4_multimodal_audio": {"num_blocks": 1, "ext_pw_out_channel": 64, "nemo_conv_channels": 64},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "reformer": {
        "axial_pos_embds": False,
        "attention_head_size": 16,
        "feed_forward_size": 48,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 16,
    },
    "xlnet": {"n_head": 4, "d_head": 16, "n_layer": 2, "d_inner": 48},
    "xlstm": {"num_heads": 4, "num_blocks": 2, "qk_dim_factor": 1.0},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}
# What some of them want instead: heads that are not grouped, more layers, their own sizes of heads.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 6},
    {"head_dim": None, "num_key_value_heads": 4},
    {"head_dim": 8, "num_key_value_heads": 4},
)
LENGTHS = (21, 13)
MOST = 3_000_000  # parameters of a tiny model


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one model type; ``how``: natively, by transformers or not.

    ``ranks``: whether two give what one does: "equal", or why not; "" of native ones. ``planned``:
    by whose plan.
    """

    model_type: str
    architecture: str
    how: str
    matches: bool
    updates: bool
    why: str = ""
    ranks: str = ""
    planned: str = ""

    def __str__(self) -> str:
        marks = " ".join(
            name for name, so in (("matches", self.matches), ("updates", self.updates)) if so
        )
        ranks = f"over two ranks by {self.planned}: {self.ranks}" if self.ranks else ""
        return f"{self.model_type:24} {self.how:16} {marks:16} {ranks} {self.why[:600]}"


def model_types() -> Iterator[tuple[str, str]]:
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        yield model_type, names if isinstance(names, str) else names[0]


def sweep(only: tuple[str, ...] = ()) -> Iterator[Row]:
    for model_type, architecture in model_types():
        if not only or model_type in only:
            with tempfile.TemporaryDirectory() as where:
                yield judge(model_type, architecture, Path(where))


def judge(model_type: str, architecture: str, where: Path) -> Row:
    """One model, from its files to an update."""

    def row(how: str, why: str = "", matches: bool = False, updates: bool = False) -> Row:
        return Row(model_type, architecture, how, matches, updates, " ".join(why.split()))

    for changes in VARIANTS:
        try:
            source = write(architecture, where / "a", 0, changes)
            changed = write(architecture, where / "b", 1, changes)
            source(torch.arange(3, 9)[None])
            break
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    else:
        return row("no tiny model", failure)
    try:
        config = ModelConfig.from_directory(where / "a")
        how = "natively" if config.hf_values is None else "by transformers"
        live = load(config, where / "a")
    except RolloutError as error:
        why = str(error).partition("Nor by transformers: ")[2].partition(". Supported: ")[0]
        return row("not", why or str(error))
    except Exception as error:
        return row("not", f"{type(error).__name__}: {error}")
    sequences = texts(config)
    with torch.no_grad():
        wanted = [source(torch.tensor([s])).logits[0].log_softmax(-1) for s in sequences]
    apart = max(
        float((a.log_softmax(-1) - b[:, : a.shape[1]]).abs().max())
        for a, b in zip(run(live, sequences), wanted, strict=True)
    )
    matches = apart < 1e-4
    why = "" if matches else f"logprobs differ by {apart:.2g}"
    try:
        shadow = live.empty_like()
        shadow.load_weights(sent(changed, shadow))
        fresh = load(config, where / "b")
    except RolloutError as error:
        return row(how, f"{why} {error}", matches)
    pairs = zip(run(shadow, sequences), run(fresh, sequences), strict=True)
    updates = all(torch.equal(a, b) for a, b in pairs)
    found = row(how, why, matches, updates)
    over = config.over_ranks
    if over is None:
        return found
    alone = (run(live, sequences), run(fresh, sequences))
    ranks = over_ranks(2, config, where / "a", changed, sequences, alone)
    return replace(found, ranks=ranks, planned=over.whole.planned_by)


def over_ranks(
    count: int,
    config: ModelConfig,
    files: Path,
    changed: Any,
    sequences: list[list[int]],
    alone: tuple[list[torch.Tensor], list[torch.Tensor]],
) -> str:
    """Whether ``count`` ranks give what one did, from ``files`` and updated from ``changed``."""

    def rank(tp: TensorParallel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        live = load(config, files, tp)
        shadow = live.empty_like()
        shadow.load_weights(sent(changed, shadow))
        return run(live, sequences), run(shadow, sequences)

    try:
        config.check_tensor_parallel(count)
        check_tables(build_tables(config, count, torch.float32))
        found = run_ranks(count, rank)
    except RolloutError as error:
        return str(error)
    pairs = [pair for one in found for pair in zip(alone, one, strict=True)]
    each = [pair for one, two in pairs for pair in zip(one, two, strict=True)]
    apart = max(float((a.log_softmax(-1) - b.log_softmax(-1)).abs().max()) for a, b in each)
    same = all(torch.equal(a.argmax(-1), b.argmax(-1)) for a, b in each)
    return "equal" if apart < 1e-4 and same else f"logprobs differ by {apart:.2g}"


def texts(config: ModelConfig) -> list[list[int]]:
    ids = torch.arange(7, 7 + sum(LENGTHS)) % config.vocab_size
    return [part.tolist() for part in ids.split(LENGTHS)]


def sent(trained: Any, to: Model) -> WeightSource:
    """What an update sends of a trainer's module to an engine that runs ``to``."""
    table = to.table
    metas = [TensorMeta(name, torch.float32, table.shape_of(name)) for name in table.slots]
    wanted = WantedWeights(
        dtype=torch.float32,
        tensors=by_name(metas),
        aliases=table.aliases,
        prefixes=table.prefixes,
        spelled=table.spellings.told,
    )
    source = detect(trained).source(wanted)
    metadata = source.metadata()
    assert metadata is not None
    check_metadata(metadata, wanted)
    return source


def write(architecture: str, where: Path, seed: int, changes: dict[str, Any]) -> Any:
    """A random tiny model of that class, saved."""
    kind = getattr(transformers, architecture)
    settings = tiny_settings(kind.config_class(), SIZES | changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(kind.config_class(**settings)).parameters())
    if size > MOST:
        raise ValueError(f"its config has parts of other names: {size / 1e6:.0f} M parameters")
    torch.manual_seed(seed)
    model = kind(kind.config_class(**settings)).eval().float()
    randomize(model, 0.5)
    model.config.dtype = torch.float32
    model.save_pretrained(where)
    return model


def tiny_settings(fields: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of ``sizes`` that a config has, and its nested configs theirs."""
    kind = type(fields)
    known = {*vars(fields), *kind.attribute_map, *getattr(kind, "__annotations__", {})}
    found = {name: value for name, value in sizes.items() if name in known}
    for name in kind.sub_configs:
        if (inner := getattr(fields, name, None)) is not None:
            found[name] = {"model_type": inner.model_type, **tiny_settings(inner, sizes)}
    return found | OWN.get(fields.model_type, {})


def load(config: ModelConfig, where: Path, tp: TensorParallel | None = None) -> Model:
    tp = tp or TensorParallel()
    with open_checkpoint(str(where)) as checkpoint:
        model = build_model(config, tp, torch.float32, "cpu", tensors=checkpoint.metadata)
        model.load_weights(checkpoint.items())
    return model


def run(model: Model, sequences: list[list[int]]) -> list[torch.Tensor]:
    session = Session(model, sequences)
    parts = [session.advance(counts) for counts in ([9, 12], [11, 0], [1, 1])]
    return [torch.cat(found) for found in zip(*parts, strict=True)]


def hush() -> None:
    """Nothing but the rows."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    hush()
    counts: Counter[str] = Counter()
    for row in sweep(tuple(sys.argv[1:])):
        print(row, flush=True)
        counts[row.how] += 1
        counts["match and update"] += row.matches and row.updates
        counts["over two ranks"] += row.ranks == "equal"
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
