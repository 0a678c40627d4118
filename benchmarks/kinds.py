"""Each kind of model, small, beside transformers: loading and greedy decoding, in turns.

    python benchmarks/kinds.py [KIND ...] [--rounds 3] [--tokens 32] [--batches 1 8]

Makes a random bfloat16 checkpoint of each kind (8 to 16 M parameters; with many experts, which have
to be named, 100 to 200 M), loads it in both, and lets them write by turns in one process: A B A B.
Prints medians, and the ratios of the same round.
Where it says int8, weights are quantised here, and bfloat16 there; where it says by transformers,
its own modules run here, too, over our pages and slots. Where it says images, each prompt begins
with one (128 x 128 pixels, 16 tokens), which both read anew in each round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollout import Rollout, SamplingParams

BASE: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 32,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
GPT_OSS = {
    "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128,
    "sliding_window": 64, "tie_word_embeddings": False,
}  # fmt: skip
START, PAD, END = 8189, 8190, 8191  # of an image, and of each of its parts
TOWER = {
    "depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "patch_size": 16,
    "out_hidden_size": 256, "deepstack_visual_indexes": [1, 2], "num_position_embeddings": 64,
}  # fmt: skip
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
PATCHES = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
DEEPSEEK = {
    "intermediate_size": 512, "first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "kv_lora_rank": 64,
    "q_lora_rank": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 8, "head_dim": 16,
}  # fmt: skip
DELTA = {
    **EXPERTS, "shared_expert_intermediate_size": 128, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
MAMBA = {
    "num_local_experts": 0, "shared_intermediate_size": 512, "mamba_n_heads": 8,
    "mamba_d_head": 64, "mamba_d_state": 128, "attention_multiplier": 0.18,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
}  # fmt: skip
OLMO = {
    "intermediate_size": 512, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64,
}  # fmt: skip
KIMI = {
    **{name: of for name, of in DEEPSEEK.items() if name not in ("n_routed_experts", "n_group")},
    "num_experts": 16, "num_expert_group": 4, "q_lora_rank": None, "linear_num_heads": 4,
    "tie_word_embeddings": False,  # transformers' class has no tied head
    "linear_head_dim": 32, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
}  # fmt: skip
MAMBA_ALONE = {
    "num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1, "num_attention_heads": None,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense (Llama)": ("Llama", {"intermediate_size": 768}),
    "windows (Gemma 2)": ("Gemma2", {"intermediate_size": 768, "sliding_window": 64}),
    "experts (Qwen3-MoE)": ("Qwen3Moe", EXPERTS),
    "latent attention, experts (DeepSeek-V3)": ("DeepseekV3", DEEPSEEK),
    "sinks, windows, experts with biases (gpt-oss)": ("GptOss", GPT_OSS),
    "images (Qwen3-VL)": ("Qwen3VL", {"intermediate_size": 768, "rope_parameters": AXES}),
    "delta nets, experts (Qwen3-Next)": ("Qwen3Next", DELTA),
    "delta nets, attention (OLMo-Hybrid)": ("OlmoHybrid", OLMO),
    "delta nets by row, latent attention, experts (Kimi-Linear)": ("KimiLinear", KIMI),
    "Mamba-2 (Granite 4)": ("GraniteMoeHybrid", MAMBA),
    "by transformers, its interface (Starcoder2)": ("Starcoder2", {"intermediate_size": 768}),
    "by transformers, its cache (Bloom)": ("Bloom", {"n_head": 8, "n_layer": 8}),
    "by transformers, its states (Mamba2)": ("Mamba2", MAMBA_ALONE),
    "int8 here (Llama)": ("Llama", {"intermediate_size": 768}),
    "int8 here, experts (Qwen3-MoE)": ("Qwen3Moe", EXPERTS),
}  # fmt: skip
MANY = {"hidden_size": 512, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "64 experts, 8 of a token (Qwen3-MoE)": ("Qwen3Moe", {**MANY, "num_experts": 64}),
    "128 experts, 8 of a token (Qwen3-MoE)": (
        "Qwen3Moe", {**MANY, "num_experts": 128, "moe_intermediate_size": 128},
    ),
    "64 experts, a shared one (GLM-4-MoE)": (
        "Glm4Moe",
        {**MANY, "n_routed_experts": 64, "n_group": 1, "topk_group": 1, "intermediate_size": 1024},
    ),
    "64 experts, latent attention (DeepSeek-V3)": (
        "DeepseekV3", {**DEEPSEEK, **MANY, "n_routed_experts": 64},
    ),
    "16 experts, one of a token (Llama 4)": (
        "Llama4Text->Llama4",
        {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 16},
    ),
}  # fmt: skip
PROMPT = 64  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="of the table's names, or a part of one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="written after each prompt")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(args.num_threads)
    heads = [f"batch {n}, tokens/s | ratio" for n in args.batches]
    print("| kind | parameters | load, s | ratio |", " | ".join(heads), "|")
    print("|---|" + "---|" * (3 + 2 * len(args.batches)))
    asked = KINDS | LARGE if args.kinds else KINDS
    for name, (stem, sizes) in asked.items():
        if not args.kinds or any(each in name for each in args.kinds):
            args.quantization = "int8" if "int8" in name else "none"
            print(f"| {name} | {compare(stem, sizes, args)} |", flush=True)


def compare(stem: str, sizes: dict[str, Any], args: argparse.Namespace) -> str:
    """A row: ours against transformers', and the median of the rounds' ratios."""
    with tempfile.TemporaryDirectory() as where:
        count = save(where, stem, sizes)
        sees = stem.endswith("VL")
        loads = [
            (timed(lambda: ours(where, args).shutdown()), timed(lambda: theirs(where)))
            for _ in range(args.rounds)
        ]
        cells = [f"{count / 1e6:.0f} M", cell(loads, 2, lambda a, b: b / a)]
        model = theirs(where)
        with ours(where, args) as engine:
            for batch in args.batches:
                rounds = []
                for turn in range(args.rounds + 1):  # the first is for warming up
                    prompts = torch.randint(0, 8000, (batch, PROMPT)).tolist()
                    images = pictures(batch) if sees else None
                    both = prompts, args.tokens, images
                    rates = speed(lambda x=both: write(engine, *x), batch, args)
                    other = speed(lambda x=both: generate(model, *x), batch, args)
                    if turn:
                        rounds.append((rates, other))
                cells.append(cell(rounds, 0, lambda a, b: a / b))
    return " | ".join(cells)


def save(where: str, stem: str, sizes: dict[str, Any]) -> int:
    """Write a model of that kind; how many parameters it has."""
    config_stem, _, stem = stem.rpartition("->")
    kind = getattr(transformers, f"{config_stem or stem}Config")
    torch.manual_seed(0)
    if stem.endswith("VL"):
        config = kind(
            text_config={**BASE, **sizes}, vision_config=TOWER, image_token_id=PAD,
            vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=True,
        )  # fmt: skip
        made = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
        Qwen2VLImageProcessorPil(**PATCHES).save_pretrained(where)
    else:
        config = kind(**{**BASE, **sizes})
        made = getattr(transformers, f"{stem}ForCausalLM")(config)
    made = made.to(torch.bfloat16)
    made.config.dtype = torch.bfloat16
    made.save_pretrained(where)
    return sum(p.numel() for p in made.parameters())


def pictures(count: int) -> list[Image.Image]:
    shape = (count, 128, 128, 3)
    return [Image.fromarray(x.numpy()) for x in torch.randint(0, 256, shape, dtype=torch.uint8)]


def cell(rounds: list[tuple[float, float]], digits: int, ratio: Callable[..., float]) -> str:
    mine, other = (statistics.median(column) for column in zip(*rounds, strict=True))
    times = statistics.median(ratio(a, b) for a, b in rounds)
    return f"{mine:.{digits}f} against {other:.{digits}f} | {times:.1f}"


def ours(where: str, args: argparse.Namespace) -> Rollout:
    return Rollout(
        where, device="cpu", num_threads=args.num_threads, num_kv_blocks=512, max_model_len=512,
        enable_prefix_caching=False, check_finite=False, quantization=args.quantization,
    )  # fmt: skip


def theirs(where: str) -> Any:
    kind = transformers.AutoModelForCausalLM
    if transformers.AutoConfig.from_pretrained(where).model_type.endswith("vl"):
        kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(where, dtype=torch.bfloat16).eval()


def write(
    engine: Rollout, prompts: list[list[int]], tokens: int, images: list[Image.Image] | None
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    if images is None:
        engine.generate(prompts, params)
    else:
        prompts = [[START, PAD, END, *ids] for ids in prompts]
        engine.generate(prompts, params, images=[[image] for image in images])


@torch.inference_mode()
def generate(
    model: Any, prompts: list[list[int]], tokens: int, images: list[Image.Image] | None
) -> None:
    seen: dict[str, Any] = {}
    if images is not None:
        seen = dict(Qwen2VLImageProcessorPil(**PATCHES)(images=images, return_tensors="pt"))
        prompts = [[START, *[PAD] * 16, END, *ids] for ids in prompts]
        seen["mm_token_type_ids"] = (torch.tensor(prompts) == PAD).int()
    ids = torch.tensor(prompts)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, eos_token_id=None, pad_token_id=0, **seen,
    )  # fmt: skip


def speed(run: Callable[[], None], batch: int, args: argparse.Namespace) -> float:
    return batch * args.tokens / timed(run)


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
