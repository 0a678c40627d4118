"""Writes docs/models.md and README's table of models from the registry, and from a sweep over the
installed transformers.

    python docs/make_models.py [--sweep]

``--sweep`` judges every causal model of transformers at tiny size again (a minute or two); else
the lists that an earlier sweep left on the page stay.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # what it tells of lies beside it

from rollout.models.arch import Arch
from rollout.models.decoder.native_blocks import knows
from rollout.models.registry import built_in
from rollout.trainer_ops.patch import SUPPORTED

PAGE = Path(__file__).with_name("models.md")
SWEPT = "## Models of transformers\n"
HEAD = """\
# Models

Made from the registry by `python docs/make_models.py`. `rollout check MODEL` says of any checkpoint
whether it is served natively, by transformers, or not, and why.

## Natively

Each is a declaration in `rollout/models/architectures/`, tested against transformers' own model.
"One call": on a CPU all blocks of a bfloat16 model run in one native call where its layers are
alike; the others run op by op, in the same kernels. Qwen3-VL, Qwen3.5 and Qwen2.5-VL see
[images and videos](vision.md). Where a name ends in `ForCausalLM` the same decoder is served as
`ForSequenceClassification`, too ([reward models](scoring.md#classifiers-and-reward-models)). "On
policy": a trainer may run the engine's ops, and has its logprobs [bit for bit](on_policy.md).

| architecture | what sets it apart | attention | feed-forward | CPU blocks | on policy |
|---|---|---|---|---|---|
"""
MIDDLE = """\

**Positions by length.** Of Phi-3 and Phi-4 with 128k tokens, and Phi-3.5-MoE (rope of the kind
`longrope`), transformers turns a sequence by one set of factors up to
`original_max_position_embeddings` tokens, by another beyond, and keys that it cached before stay as
they were. Here the choice is made once, by `max_model_len`, so that every cached key stays true:
above the original length the long factors serve every sequence, also a short one, whose logprobs
then are not transformers'. Longer ones have the logprobs that one pass of transformers over the
whole sequence gives. `max_model_len` at the original length or below it serves the short ones as
transformers does. `rollout check` says where this applies.

## By transformers

Any other causal model of the installed transformers runs as its own modules: with our pages,
batches, prefix cache, sampling and updates, without native blocks, captured graphs or
`deterministic=True`. Where its attention goes through transformers' attention interface, a step is
one pass. Else (attention of its own, biases by distance, an index of keys, recurrent states) a step
goes over a cache of transformers' kind whose keys, values and states lie in our pages and slots:
all sequences that decode in one pass, shorter contexts padded at the left under a mask, and
prefills of equal length in another. No code of a checkpoint is run. After the first load its
logprobs over pages, of three sequences, are compared with those of the same modules alone, under
transformers' own attention. Modules that do not bear padding decode with sequences of equal length,
or each alone; a model for which logprobs differ even so is refused. So is rope that depends on a
sequence's length (`dynamic`, `longrope`).

Over several ranks (`tensor_parallel_size`) such a model is cut by transformers' own plan, where its
config has one (`base_model_tp_plan`), or by ours, where it has none or one that is not true of it:
linears by columns and rows, stacked experts within each, sinks, and the vocabulary at both ends. A
rank reads and keeps its boxes of each tensor, under the same names, so updates, deltas and digests
are those of one rank. Attention and its cache are cut by heads where the plan cuts them, else whole
on every rank; heads of keys and values that are fewer than the ranks have copies; recurrent states
are always whole. Kinds of transformers' plans: `colwise`, `colwise_gather_output`, `rowwise`,
`rowwise_split_input`, `packed_colwise`, `packed_rowwise`, `embedding_rowwise`, `embedding_colwise`,
`moe_tp_experts`, `moe_identity_expert`, `all_reduce`, and those that cut nothing. Another kind,
sizes or heads that do not divide, and modules whose shapes do not come out are refused by name,
with the sizes that work. `rollout check` says on how many ranks it runs, by whose plan, and why not
on more.

"""


def page(swept: str) -> str:
    rows = "".join(f"{row}\n" for row in table())
    kept = "".join(f"{row}\n" for row in memory())
    windowed = "".join(f"{row}\n" for row in windows())
    return f"{HEAD}{rows}{MIDDLE}{MEMORY}{kept}{WINDOWS}{windowed}\n{SWEPT}\n{swept}"


def table() -> Iterable[str]:
    """A row for each declared architecture, in the order of their names."""
    for name, path in sorted(built_in().items()):
        module = import_module(path.partition(":")[0])
        arch: Arch = getattr(module, name)
        story = (module.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")
        blocks = "one call" if knows(arch) else "op by op"
        trained = "yes" if name in SUPPORTED else ""
        kinds = f"{_attention(arch)} | {_feed_forward(arch)}"
        yield f"| `{name}` | {story} | {kinds} | {blocks} | {trained} |"


# Of hybrids, and two others beside them: what sets a size apart from its config class's defaults.
SIZES: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {},
    "Qwen3_5ForCausalLM": {},
    "OlmoHybridForCausalLM": {},
    "KimiLinearForCausalLM": {},
    "BambaForCausalLM": {"attn_layer_indices": [9, 18, 27], "mamba_d_state": 128},
    "GraniteMoeHybridForCausalLM": {
        "num_hidden_layers": 40,
        "layer_types": ["full_attention" if i % 10 == 5 else "linear_attention" for i in range(40)],
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
    "NemotronHForCausalLM": {
        "layers_block_type": [
            {"M": "linear_attention", "-": "mlp", "*": "full_attention"}[kind]
            for kind in f"{'M-' * 3}M*-{('M-' * 4 + 'M*-') * 3}{'M-' * 5}"
        ],
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
    },
    "FalconH1ForCausalLM": {
        "num_hidden_layers": 44,
        "hidden_size": 3072,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
    },
    "DeepseekV3ForCausalLM": {},
    "DeepseekV32ForCausalLM": {},
    "Qwen3MoeForCausalLM": {"num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128},
}
BLOCK, LONG = 16, 8192  # positions of a block, tokens of a long sequence
MEMORY = f"""\
## Memory of caches

Made by `python docs/make_models.py` from what the engine plans with (`KVShape.block_bytes`,
`StateShape.slot_bytes`), for bfloat16 on one rank. Sizes are the defaults of transformers' config
classes, or those that `SIZES` there has. A sequence that runs has one slot of states, and each
snapshot of a prefix another, whatever its length; keys and values grow by the token. Routed experts
are kept with the token, a byte each.

| architecture | layers | attend | carry a state | bytes a token | states | with {LONG} tokens |
|---|---|---|---|---|---|---|
"""


def memory() -> Iterable[str]:
    """A row for each of ``SIZES``."""
    import torch
    import transformers

    from rollout.engine.worker.kv_cache import KVCache, KVShape
    from rollout.engine.worker.state_cache import StateShape
    from rollout.models.config.model import ModelConfig

    for name, sizes in SIZES.items():
        values = getattr(transformers, name).config_class(**sizes).to_dict()
        config = ModelConfig.from_hf({**values, "architectures": [name]})
        moe = config.moe
        sparse = sum(map(moe.is_sparse, range(config.num_layers))) if moe else 0
        shape = KVShape.of(config, 1, BLOCK, torch.bfloat16, sparse)
        pages = KVCache(shape, torch.device("meta"))
        states = StateShape.of(config, 1, torch.bfloat16)
        token, slot = pages.token_bytes, states.slot_bytes
        numbers = (config.num_layers, shape.num_layers, len(states.layers), f"{token:,}")
        sums = (f"{slot / 2**20:.1f} MiB", f"{(slot + LONG * token) / 2**20:.0f} MiB")
        yield f"| `{name}` | {' | '.join(map(str, (*numbers, *sums)))} |"


SLIDING: dict[str, tuple[str, dict[str, Any]]] = {  # of releases
    "Gemma 3 27B": (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
    ),
    "gpt-oss-20b": ("GptOssForCausalLM", {"num_hidden_layers": 24}),
    "gpt-oss-120b": ("GptOssForCausalLM", {"num_hidden_layers": 36}),
    "Llama 4 Scout": ("Llama4ForCausalLM", {}),
    "Olmo 3 32B": (
        "Olmo3ForCausalLM",
        {
            "num_hidden_layers": 64,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 65536,
        },
    ),
    "Mistral 7B v0.1": ("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
}
DEEP, ROOM, AHEAD = 32768, 1 << 35, 2048  # tokens; bytes of pages; tokens of a step
WINDOWS = f"""
### Layers with windows

Layers that attend to a window, or a chunk, keep that alone: what a sequence has left behind is
given back while it runs ([how](architecture.md#layers-that-forget)). A page holds as many layers as
the kind with the fewest has; all kinds take theirs from one pool. Made by the same script, for
bfloat16 on one rank, blocks of {BLOCK} tokens, steps of at most {AHEAD}: what one sequence of
{DEEP:,} tokens holds at the most, and how many such fit in {ROOM >> 30} GiB.

| model | layers | forget | groups of pages | one sequence | without windows | fit | without |
|---|---|---|---|---|---|---|---|
"""


def windows() -> Iterable[str]:
    """A row for each of ``SLIDING``."""
    import torch
    import transformers

    from rollout.engine.worker.kv_cache import KVShape
    from rollout.models.config.model import ModelConfig
    from rollout.models.decoder.kv_groups import blocks_of_sequence

    for model, (name, sizes) in SLIDING.items():
        values = getattr(transformers, name).config_class(**sizes).to_dict()
        config = ModelConfig.from_hf({**values, "architectures": [name]})
        shape = KVShape.of(config, 1, BLOCK, torch.bfloat16)
        forget = sum(len(group.layers) for group in shape.groups if group.forgets)
        held = blocks_of_sequence(shape.groups, DEEP, AHEAD, BLOCK) * shape.block_bytes
        whole = DEEP // BLOCK * shape.block_bytes * shape.num_layers // shape.page_layers
        numbers = (config.num_layers, forget, f"{len(shape.groups)} of {shape.page_layers}")
        sums = (f"{held / 2**20:.0f} MiB", f"{whole / 2**20:.0f} MiB", ROOM // held, ROOM // whole)
        yield f"| {model} | {' | '.join(map(str, (*numbers, *sums)))} |"


README = PAGE.parents[1] / "README.md"
BEGIN, END = "<!-- models: made by docs/make_models.py -->\n", "<!-- end of models -->\n"
SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")


def readme(text: str, swept: str) -> str:
    """README with its table of models as the registry and the last sweep have them."""
    before, _, rest = text.partition(BEGIN)
    rows = "".join(f"{row}\n" for row in kinds(swept))
    return f"{before}{BEGIN}{rows}{END}{rest.partition(END)[2]}"


def kinds(swept: str) -> Iterable[str]:
    """The kinds of models there are, each with its architectures, once without their suffixes."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, path in sorted(built_in().items()):
        arch: Arch = getattr(import_module(path.partition(":")[0]), name)
        short = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
        found[_kind(arch)].append(f"`{short}`")
    yield "| kind | native architectures |"
    yield "|---|---|"
    for kind, names in found.items():
        yield f"| {kind} | {', '.join(dict.fromkeys(names))} |"
    others = re.search(r"^(\d+) by transformers", swept, re.MULTILINE)
    count = others[1] if others else "others"
    more = re.search(r"^(\d+) of these over two ranks", swept, re.MULTILINE)
    parallel = f"; {more[1]} of them tensor parallel" if more else ""
    types = f"{count} more model types of transformers {_version()}{parallel}"
    yield f"| by transformers' modules | {types} |"


def _kind(arch: Arch) -> str:
    if arch.vision is not None:
        return "with images and videos"
    if arch.delta is not None or arch.mamba is not None:
        return "hybrid: recurrent states beside attention"
    if arch.latent is not None:
        return "latent attention, experts"
    return "dense" if arch.moe is None else "mixture of experts"


def _attention(arch: Arch) -> str:
    if arch.delta is not None:
        full = "latent" if arch.latent else "gated full" if arch.gated else "full"
        return (
            f"delta nets gated by row, {full}" if arch.delta.by_row else f"gated delta nets, {full}"
        )
    if arch.latent is not None:
        return "latent" if arch.latent.index is None else "latent, to what an index chooses"
    if arch.mamba is not None:
        return "Mamba-2 beside full" if arch.mamba.beside else "Mamba-2, full"
    found = ["full"] if arch.slides is None else ["windows as the file says"]
    found += ["chunks"] if arch.chunked else []
    found += ["sinks"] if arch.sinks else []
    found += ["capped scores"] if arch.attention_softcap else []
    return ", ".join(found)


def _feed_forward(arch: Arch) -> str:
    return "dense" if arch.moe is None else "experts"


def swept_lists(rows: Iterable[Any]) -> str:
    """What a sweep found: the types served each way, and reasons for the rest."""
    served: dict[str, list[str]] = defaultdict(list)
    reasons: dict[str, list[str]] = defaultdict(list)
    ranks: dict[str, list[str]] = defaultdict(list)
    plans: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.matches and row.updates and row.ranks:
            ranks[row.ranks].append(row.model_type)
            if row.ranks == "equal":
                plans[row.planned].append(row.model_type)
        if row.matches and row.updates:
            served[row.how].append(row.model_type)
        else:
            reasons[reason(row)].append(row.model_type)
    total = sum(map(len, (*served.values(), *reasons.values())))
    good = sum(map(len, served.values()))
    lines = [
        f"`python docs/make_models.py --sweep` on transformers {_version()}, at tiny size:",
        f"of {total} model types with a causal class, {good} load, match transformers' logprobs to",
        "1e-4, and are updated by their own module to the bits of a fresh start. What a config has",
        "beyond that is judged when a checkpoint is checked.",
        "",
    ]
    for how in ("natively", "by transformers"):
        lines += [f"{len(served[how])} {how}: {_names(served[how])}.", ""]
    both = ranks.pop("equal", [])
    lines += [
        f"{len(both)} of these over two ranks, too: logprobs equal those of one rank to 1e-4 and",
        "greedy tokens are the same, from files and after an update.",
        "",
        "| cut over two ranks by | model types |",
        "|---|---|",
        *(f"| {by} | {len(types)}: {_names(types)} |" for by, types in plans.items()),
        "",
        "| by transformers' modules, and not over two ranks, why | model types |",
        "|---|---|",
        *(f"| {why} | {len(types)}: {_names(types)} |" for why, types in _by_reason(ranks).items()),
    ]
    lines += ["", "| the others, and why not | model types |", "|---|---|"]
    for why, types in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"| {why} | {len(types)}: {_names(types)} |")
    return "\n".join(lines) + "\n"


def reason(row: Any) -> str:
    """A line for all models with one kind of reason."""
    why = row.why
    for part, said in (
        ("tid2eid", "integer tables in files, by which tokens choose experts"),
        ("w13_weight", "files that interleave the rows of a tensor in memory"),
        ("timm", "towers of the package timm, which is not installed"),
        ("[-1, 4, 6]", "several tokens at each position: codebooks of audio"),
        ("does not go through the interface", "their attention does not go through the interface"),
        ("need more than a KV cache", "layers that need more than a KV cache"),
        ("states beside", "states that they keep outside of a cache"),
        ("through a cache", "no use of a cache: every token computes the whole text again"),
        ("of its own and is not", "a cache of a class of their own"),
        ("fail over a cache", "caches that take no chunk of a prompt, or more than its tokens"),
        ("convolutions over tokens", "convolutions over tokens"),
        ("only causal attention", "attention that is not causal by default"),
        (
            "do not run without memory",
            "modules that look at values before any are there",
        ),
        ("logprobs differ", "states that they keep in their modules, so that sequences mix"),
        ("unknown tensor", "files that name or shape tensors otherwise than the modules"),
        ("were not initialized", "files that name or shape tensors otherwise than the modules"),
        ("no box of a parameter", "files that name or shape tensors otherwise than the modules"),
        ("has no vocab_size", "configs without the usual fields"),
        ("its config has no", "configs without the usual fields"),
        ("cannot be made of this config", "configs without the usual fields"),
    ):
        if part in why:
            return said
    if row.model_type.endswith("_assistant"):
        return "draft models, which attend to another model's keys"
    if row.model_type == "blt":
        return "bytes in patches, of which another model within tells the ends"
    if row.how == "no tiny model":
        return "no tiny model could be made of their config"
    return "another refusal"


def _by_reason(refused: dict[str, list[str]]) -> dict[str, list[str]]:
    """What refusals of two ranks say of the models, without what is so of every one."""
    found: dict[str, list[str]] = defaultdict(list)
    for why, types in refused.items():
        told = re.search(r"not on 2 ranks: (.*)\. Sizes that work", why)
        found[told[1] if told else why] += types
    return found


def _names(types: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in sorted(types))


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def swept_part() -> str:
    """What the page has of the last sweep."""
    return PAGE.read_text().partition(f"{SWEPT}\n")[2] if PAGE.exists() else ""


def main() -> None:
    swept = swept_part()
    if "--sweep" in sys.argv[1:]:
        tests = PAGE.parents[1] / "tests"
        sys.path[:0] = [str(tests), str(tests / "models")]
        import transformers_sweep

        transformers_sweep.hush()
        swept = swept_lists(transformers_sweep.sweep())
    PAGE.write_text(page(swept))
    README.write_text(readme(README.read_text(), swept))


if __name__ == "__main__":
    main()
