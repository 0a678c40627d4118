"""Plans of tensor parallelism of ours, for types that transformers has none for, or no true one.

A row says which modules are cut, by the ends of their names, and how (``plan.KINDS``).
Only types that a sweep has shown to give over ranks what they give on one have a row; of a config
under which attention is not made of heads side by side the rest alone is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

COLUMNS, ROWS, HEADS, WHOLE = "colwise", "rowwise", "heads", "replicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlan:
    """The ends of names of modules and parameters -> kinds; ``attends`` but where ``whole``."""

    attends: Mapping[str, str] = field(default_factory=dict)
    rest: Mapping[str, str] = field(default_factory=dict)
    whole: Callable[[Any], bool] = lambda config: False

    def kinds(self, config: Any, names: Iterable[str]) -> dict[str, str]:
        """Those of ``names`` that it cuts -> how; ``config``: of the decoder."""
        rules = {**self.rest, **({} if self.whole(config) else self.attends)}
        ends = [(re.compile(rf"(?:.*\.)?{end}"), kind) for end, kind in rules.items()]
        return {
            name: kind for name in names for end, kind in ends if end.fullmatch(name) is not None
        }


SPLIT = {r"self_attn\.[qkv]_proj": COLUMNS, r"self_attn\.o(ut)?_proj": ROWS}
COUNTED = {**SPLIT, "self_attn": HEADS}
GATED = {r"mlp\.(gate|up)_proj": COLUMNS, r"mlp\.down_proj": ROWS}
FC = {"fc1": COLUMNS, "fc2": ROWS}
H_TO_4H = {r"mlp\.dense_h_to_4h": COLUMNS, r"mlp\.dense_4h_to_h": ROWS}
BY_HEAD = {r"(self_)?att(entio)?n\.query_key_value": COLUMNS, r"(self_)?att(entio)?n\.dense": ROWS}

LLAMA = OwnPlan(attends=SPLIT, rest=GATED)
BART = OwnPlan(attends=SPLIT, rest=FC)
COUNTED_BART = OwnPlan(attends=COUNTED, rest=FC)
BERT = OwnPlan(
    attends={
        r"attention\.self": HEADS,
        r"attention\.self\.(query|key|value)": COLUMNS,
        r"attention\.output\.dense": ROWS,
    },
    rest={r"\d+\.intermediate\.dense": COLUMNS, r"\d+\.output\.dense": ROWS},
)
GPT2 = OwnPlan(
    attends={
        "attn": HEADS,
        r"attn\.c_attn": "conv1d_packed_colwise",
        r"attn\.c_proj": "conv1d_rowwise",
    },
    rest={r"mlp\.c_fc": "conv1d_colwise", r"mlp\.c_proj": "conv1d_rowwise"},
)
PERSIMMON = OwnPlan(attends={**BY_HEAD, "self_attn": HEADS}, rest=H_TO_4H)
BLOOM = OwnPlan(attends={**BY_HEAD, "self_attention": "biased_heads"}, rest=H_TO_4H)
LFM = OwnPlan(
    attends={**SPLIT, r"self_attn\.g_proj": COLUMNS},
    rest={r"feed_forward\.w[13]": COLUMNS, r"feed_forward\.w2": ROWS},
)
_BART = "bart biogpt blenderbot blenderbot-small marian mbart pegasus plbart"
_BERT = """
bert bert-generation camembert data2vec-text electra ernie git megatron-bert rembert
roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
"""
# By model_type of the decoder.
OWN: dict[str, OwnPlan] = {
    **dict.fromkeys(("emu3_text_model", "hunyuan_v1_dense"), LLAMA),
    **dict.fromkeys(_BART.split(), BART),
    **dict.fromkeys(("bigbird_pegasus", "mvp", "opt", "whisper", "xglm"), COUNTED_BART),
    **dict.fromkeys(_BERT.split(), BERT),
    **dict.fromkeys(("gpt2", "gpt-sw3"), GPT2),
    **dict.fromkeys(("persimmon", "fuyu"), PERSIMMON),
    **dict.fromkeys(("lfm2", "lfm3"), LFM),
    "big_bird": OwnPlan(rest=BERT.rest),
    "bitnet": OwnPlan(
        attends={
            r"self_attn\.[qkv]_proj": COLUMNS,
            r"self_attn\.attn_sub_norm": "gather_input",
            r"self_attn\.o_proj": "rowwise_split_input",
        },
        rest={
            r"mlp\.(gate|up)_proj": COLUMNS,
            r"mlp\.ffn_sub_norm": "gather_input",
            r"mlp\.down_proj": "rowwise_split_input",
        },
    ),
    "bloom": BLOOM,
    "codegen": OwnPlan(rest={r"mlp\.fc_in": COLUMNS, r"mlp\.fc_out": ROWS}),
    "ctrl": OwnPlan(
        attends={
            r"multi_head_attention\.W[qkv]": COLUMNS,
            r"multi_head_attention\.dense": ROWS,
        },
        rest={r"ffn\.0": COLUMNS, r"ffn\.2": ROWS},
    ),
    "diffllama": OwnPlan(rest=GATED),  # pairs of heads lie apart
    # Its mask is made of the values of all heads.
    "doge": OwnPlan(attends={r"self_attn\.\w+": WHOLE}),
    "falcon": OwnPlan(
        attends=BLOOM.attends,
        rest=H_TO_4H,
        whole=lambda config: config.multi_query and not config.new_decoder_architecture,
    ),
    # Its first MLPs take means over all columns.
    "gemma3n_text": OwnPlan(
        rest={
            r"mlp\.(gate|up)_proj": "colwise_gather_output",
            r"mlp\.down_proj": "rowwise_split_input",
        }
    ),
    "gpt_bigcode": OwnPlan(
        attends={"attn": HEADS, r"attn\.c_attn": COLUMNS, r"attn\.c_proj": ROWS},
        rest={r"mlp\.c_fc": COLUMNS, r"mlp\.c_proj": ROWS},
        whole=lambda config: config.multi_query,
    ),
    "gpt_neo": OwnPlan(
        attends={
            r"attn\.attention": HEADS,
            r"attn\.attention\.[qkv]_proj": COLUMNS,
            r"attn\.attention\.out_proj": ROWS,
        },
        rest={r"mlp\.c_fc": COLUMNS, r"mlp\.c_proj": ROWS},
    ),
    "gpt_neox_japanese": OwnPlan(attends={**BY_HEAD, "attention": HEADS}, rest=H_TO_4H),
    "gptj": OwnPlan(
        attends={"attn": HEADS, r"attn\.[qkv]_proj": COLUMNS, r"attn\.out_proj": ROWS},
        rest={r"mlp\.fc_in": COLUMNS, r"mlp\.fc_out": ROWS},
    ),
    "mllama_text_model": OwnPlan(attends=COUNTED, rest=GATED),
    "modernbert-decoder": OwnPlan(
        attends={r"attn\.[qkv]_proj": COLUMNS, r"attn\.Wo": ROWS},
        rest={r"mlp\.Wi": "packed_colwise", r"mlp\.Wo": ROWS},
    ),
    "moshi": OwnPlan(
        attends={r"self_attn\.[qkv]_proj\.linear": COLUMNS, r"self_attn\.o_proj\.linear": ROWS},
        rest={r"mlp\.fc1": "packed_colwise", r"mlp\.fc2": ROWS},
    ),
    "mpt": OwnPlan(
        attends={
            "attn": "biased_heads",
            r"attn\.Wqkv": "packed_qkv_colwise",
            r"attn\.out_proj": ROWS,
        },
        rest={r"ffn\.up_proj": COLUMNS, r"ffn\.down_proj": ROWS},
    ),
    "stablelm": OwnPlan(
        attends=COUNTED, rest=GATED, whole=lambda config: config.qk_layernorm
    ),  # a norm for each head
    "trocr": OwnPlan(rest=FC),
    "zamba": OwnPlan(
        attends=SPLIT,
        rest={r"feed_forward\.(gate|up)_proj": COLUMNS, r"feed_forward\.down_proj": ROWS},
    ),
    "zamba2": OwnPlan(
        attends=SPLIT,
        rest={
            r"feed_forward\.gate_up_proj": "packed_colwise",
            r"feed_forward\.gate_up_proj_adapter_list\.\d+\.1": "packed_colwise",
            r"feed_forward\.down_proj": ROWS,
        },
        whole=lambda config: config.use_shared_attention_adapter,
    ),
    "zaya": OwnPlan(
        rest={
            r"mlp\.experts": "moe_tp_experts",
            r"mlp\.experts\.gate_up_proj": "packed_colwise",
            r"mlp\.experts\.down_proj": ROWS,
        }
    ),
}


def own_kinds(config: Any, names: Iterable[str]) -> dict[str, str]:
    """What our plan for a decoder's ``model_type`` cuts of ``names``; none where there is none."""
    plan = OWN.get(config.model_type)
    if plan is None or getattr(config, "slow_but_exact", False):  # which slices weights itself
        return {}
    return plan.kinds(config, names)
