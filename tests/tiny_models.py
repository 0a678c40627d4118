"""Tiny random checkpoints of the supported architectures, written through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ARCHITECTURES: dict[str, tuple[type[Any], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
# Two gated delta nets, then a layer of attention; odd sizes, value heads that share keys. What a
# state gives at first may be near to nothing, and its norm would blow up the last bits of it.
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,
}
# Two of Mamba-2, then a layer of attention; more ranks than groups, too.
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "rms_norm_eps": 1e-3,
}
# Dense ones, under the stems of their classes, and what sets their tiny models apart.
SLIDING: dict[str, Any] = {"sliding_window": 7}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [2], "mamba_n_groups": 1}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": ("Cohere2", {**SLIDING, "num_hidden_layers": 4, "logit_scale": 0.3}),
    "falcon_h1": (
        "FalconH1",
        {
            **MAMBA,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.8, 1.1, 0.7, 1.4, 0.9],
            "mlp_multipliers": [0.9, 0.6],
            "lm_head_multiplier": 0.4,
        },
    ),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {**SLIDING, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**SLIDING, "query_pre_attn_scalar": 24, "num_hidden_layers": 6}),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.5,
        },
    ),
    "ministral": (
        "Ministral",
        {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "ministral3": (
        "Ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            }
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo_hybrid": ("OlmoHybrid", {**DELTA, "linear_value_head_dim": 20}),
    "olmo3": ("Olmo3", {**SLIDING, "num_hidden_layers": 4}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "phi3": ("Phi3", {**SLIDING, "partial_rotary_factor": 0.5}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
}
# Mixtures, under the stems of their classes; ``EXPERTS`` has the rest.
MIXTURES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "glm_moe_dsa": "GlmMoeDsa",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "gpt_oss": "GptOss",
    "granite_hybrid": "GraniteMoeHybrid",
    "kimi_linear": "KimiLinear",
    "llama4": "Llama4",
    "minimax_m2": "MiniMaxM2",
    "nemotron_h": "NemotronH",
    "phimoe": "Phimoe",
    "olmoe": "Olmoe",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_next": "Qwen3Next",
}
TEXTS = ("gemma3", "llama4", "qwen3_5", "qwen3_5_moe")  # whose configs are called so
for _name, _stem in [*((name, stem) for name, (stem, _) in DENSE.items()), *MIXTURES.items()]:
    _config = f"{_stem}{'Text' if _name in TEXTS else ''}Config"
    ARCHITECTURES[_name] = (
        getattr(transformers, _config),
        getattr(transformers, f"{_stem}ForCausalLM"),
    )
# Six experts of 24, two for each token; Mixtral's expert size is its intermediate_size.
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 6,  # as transformers has it: of the part that turns
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        **LATENT,
    },
    "deepseek_v3": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        **LATENT,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 10,
        "n_groups": 2,
        "ssm_state_size": 12,
        "layer_norm_epsilon": 1e-3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 0,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "llama4": {
        "num_local_experts": 6,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "attention_chunk_size": 16,
        "floor_scale": 8,
        "attn_scale": 0.3,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "sliding_window": 7,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "phimoe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "router_jitter_noise": 0.1,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "minimax_m2": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "rotary_dim": 8,
    },
    "olmoe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
}
EXPERTS["granite_hybrid"] = {
    **EXPERTS["mixtral"],
    **DENSE["granite"][1],
    **MAMBA,
    "layer_types": DELTA["layer_types"],
    "shared_intermediate_size": 40,
}
EXPERTS["kimi_linear"] = {
    **{name: size for name, size in LATENT.items() if name != "head_dim"},
    "q_lora_rank": None,
    "num_hidden_layers": 3,
    "layer_types": DELTA["layer_types"],
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_expert_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-3,
}
EXPERTS["qwen3_5_moe"] = {**EXPERTS["qwen2_moe"], **DELTA}
EXPERTS["qwen3_next"] = {**EXPERTS["qwen2_moe"], **DELTA, "mlp_only_layers": [1]}
EXPERTS["glm4_moe_lite"] = {
    **{key: value for key, value in EXPERTS["deepseek_v3"].items() if key[:5] != "first"},
    "mlp_layer_types": ["sparse", "dense"],
}
INDEX = {"index_n_heads": 12, "index_head_dim": 18, "index_topk": 11}
EXPERTS["deepseek_v32"] = {**EXPERTS["deepseek_v3"], **INDEX}
EXPERTS["glm_moe_dsa"] = {**EXPERTS["deepseek_v3"], **INDEX}
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A rollout service samples with the weights the trainer has just sent.",
    "Hello, world! How are you today? I am fine, thank you.",
    "One two three four five six seven eight nine ten.",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny(
    path: str | Path,
    arch: str = "qwen3",
    *,
    tied: bool = False,
    num_layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    original_format: bool = True,
    labels: int = 0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """Save a tiny random model into ``path`` and return it, in eval mode.

    Defaults: hidden 64, 4 heads, 2 KV heads, head_dim 16, intermediate 128, vocabulary 320, two
    layers; any config field may be overridden. Every parameter, biases and norms included, is
    random, and wide enough that the greedy token is well separated. The same arguments give the
    same bits. ``tokenizer=True`` adds a byte-level BPE tokenizer with a chat template; its
    ``<|im_end|>`` becomes the end-of-sequence token (else there is none).
    ``labels``: of a sequence classifier over the same decoder, in the place of the language model.
    ``original_format=False`` writes the names that transformers has in memory (fused experts).
    """
    config_class, model_class = ARCHITECTURES[arch]
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    settings.update(EXPERTS.get(arch, {}))
    settings.update(DENSE[arch][1] if arch in DENSE else {})
    settings.update(config_overrides)
    if labels:
        settings["num_labels"] = labels
        stem = model_class.__name__.removesuffix("ForCausalLM")
        stem += "Text" if arch in TEXTS else ""
        model_class = getattr(transformers, f"{stem}ForSequenceClassification")
    fast = make_tokenizer(settings["vocab_size"]) if tokenizer else None
    if fast is not None:
        settings["eos_token_id"] = fast.eos_token_id
        settings["pad_token_id"] = fast.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**settings)).eval()
        randomize(model)
    model = model.to(dtype)
    model.config.dtype = dtype
    if not labels:
        model.generation_config.do_sample = False
    model.save_pretrained(path, save_original_format=original_format)
    if fast is not None:
        fast.save_pretrained(path)
    return model


def randomize(model: torch.nn.Module, scale: float = 1.0) -> None:
    """Fill every parameter in place from the global generator, norms around one.

    And what is trained but no parameter: the bias on the choice of experts.
    """
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and not parameter.any():  # it is added to one
                parameter.uniform_(-0.5, 0.5)
            elif any("norm" in part for part in name.split(".")[-2:]):  # not all of DBRX's
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1 * scale)
            elif parameter.dim() == 2 and "embed" in name:
                parameter.normal_(0.0, 0.5 * scale)
            else:
                parameter.normal_(0.0, 1.5 * scale / parameter.shape[-1] ** 0.5)


def make_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most ``vocab_size`` tokens (at least 260)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
