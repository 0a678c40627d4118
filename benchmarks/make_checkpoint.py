"""Write a random-weight bfloat16 checkpoint with a tokenizer and a chat template, offline.

    python benchmarks/make_checkpoint.py SHAPE DIRECTORY [--seed N]

Shapes: tiny, moe, hybrid, qwen05b, llama1b, llama8b.

The tokenizer is a byte-level BPE trained on the standard library's sources.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

PAD, START, END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny() -> PreTrainedConfig:
    """Qwen3, about 10 M parameters."""
    return Qwen3Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


def moe() -> PreTrainedConfig:
    """Qwen3-MoE, about 17 M parameters: 16 experts, four for each token."""
    return Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


def hybrid() -> PreTrainedConfig:
    """Qwen3.5, about 0.4 B parameters: three gated delta nets to one layer of attention."""
    return Qwen3_5TextConfig(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )


def qwen05b() -> PreTrainedConfig:
    """Qwen2, the sizes of Qwen2.5-0.5B."""
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
    )


def llama1b() -> PreTrainedConfig:
    """Llama, the sizes of TinyLlama-1.1B."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )


def llama8b() -> PreTrainedConfig:
    """Llama, the sizes of Llama-3.1-8B."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        rope_theta=500000.0,
    )


SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "tiny": tiny,
    "moe": moe,
    "hybrid": hybrid,
    "qwen05b": qwen05b,
    "llama1b": llama1b,
    "llama8b": llama8b,
}


def write(shape: str, directory: Path, seed: int = 1234) -> int:
    """Write the checkpoint; returns its number of parameters."""
    tokenizer = make_tokenizer()
    config = SHAPES[shape]()
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.bos_token_id = tokenizer.pad_token_id
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.do_sample = False
    model.save_pretrained(directory, max_shard_size="300MB")
    tokenizer.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
    )
    tokenizer.train_from_iterator(_library_sources(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=32768
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _library_sources() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:300]:
        yield path.read_text(errors="ignore")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    count = write(args.shape, args.directory, args.seed)
    print(f"{args.directory}: {count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
