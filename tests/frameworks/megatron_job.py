"""Real Megatron-Core models over four ranks: TP 2, PP 2, EP 2 (experts' tensor parallelism 1).

    megatron_job.py RANK WORLD PORT CLIENT

Each JSON line of stdin is a command, answered by one line: what the update said, or its error; of
"forward", nothing: the weights that it drew and the logits that Megatron makes of them are files.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

sys.path.insert(0, sys.argv[4])

from frameworks.megatron_layouts import HYBRIDS, shard, unstacked
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

from rollout import Rollout
from rollout.errors import RolloutError
from rollout.integrations.megatron import MegatronSource
from rollout.weight_sync.trainer.sources.names import named_weights
from rollout.weights.components import own_name

PADDED = 336
# Megatron asks for a card by name: tied embeddings are moved there to add them up, rope tables and
# gathered logits are made there, and dropout (0 here) has a generator there.
torch.Tensor.cuda = lambda self, *_, **__: self
torch.cuda.current_device = lambda: "cpu"
# Which 0.16.1 asks for without Transformer Engine, too.
moe_utils.te_general_gemm = None
multi_latent_attention.TELinear = type("TELinear", (), {})
CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()
_attention = DotProductAttention.__init__


def _with_channels(self: Any, *args: Any, k_channels: Any = 0, v_channels: Any = 0, **rest: Any):
    """That of latent attention, which is Transformer Engine's in Megatron: values have a size of
    their own.
    """
    _attention(self, *args, **rest)
    if v_channels:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


DotProductAttention.__init__ = _with_channels
# Delta nets ask for kernels of cards: a norm, and a rule that Megatron has in torch as well.
gated_delta_net.HAVE_FLA, gated_delta_net.l2norm = True, l2norm


class NormAddedToOne(torch.nn.Module):
    """What Transformer Engine's and Apex's norms are under ``layernorm_zero_centered_gamma``."""

    zero_centered_gamma = True

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)


_norm = WrappedTorchNorm.__new__


def _with_one(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **rest: Any) -> Any:
    if config.layernorm_zero_centered_gamma:
        return NormAddedToOne(hidden_size, eps)
    return _norm(cls, config, hidden_size, eps, **rest)


WrappedTorchNorm.__new__ = staticmethod(_with_one)


def build(hf: dict[str, Any]) -> GPTModel:
    """The model of this rank, in Megatron's own layer specification."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((hf[name] for name in counts if hf.get(name)), None)
    latent, hybrid = "kv_lora_rank" in hf, hf["model_type"] in HYBRIDS
    heads = 1 if hybrid else hf.get("num_nextn_predict_layers") or None
    normed = latent or hf.get("use_qk_norm", hf["model_type"] != "qwen2_moe")
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        ffn_hidden_size=hf["intermediate_size"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf["model_type"] == "qwen2_moe" or hf.get("attention_bias", False),
        normalization="RMSNorm",
        qk_layernorm=normed,
        use_cpu_initialization=True,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        pipeline_dtype=torch.float32,
        layernorm_epsilon=hf["rms_norm_eps"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        moe_token_dispatcher_type="allgather",
        mtp_num_layers=heads,
        **(mixture(hf, experts) if experts else {}),
        **(latent_sizes(hf) if latent else {}),
        **(of_hybrids(hf) if hybrid else {}),
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=normed, normalization="RMSNorm",
        multi_latent_attention=latent,
    )  # fmt: skip
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = of_stage(hf, experts, stage) if hybrid else spec
    behind = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if heads else None
    return GPTModel(
        config,
        layers,
        vocab_size=PADDED,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_percent=hf["rope_parameters"].get("partial_rotary_factor", 1.0),
        rotary_base=hf["rope_parameters"]["rope_theta"],
        parallel_output=False,
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        pre_process=stage == 0,
        post_process=stage == 1,
        mtp_block_spec=behind,
    )


def mixture(hf: dict[str, Any], experts: int) -> dict[str, Any]:
    shared = hf.get("shared_expert_intermediate_size")
    if hf.get("n_shared_experts"):
        shared = hf["n_shared_experts"] * hf["moe_intermediate_size"]
    sigmoid = hf["model_type"] in ("deepseek_v3", "glm4_moe")
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": hf.get("moe_intermediate_size"),
        "moe_router_topk": hf.get("num_experts_per_tok"),
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor"),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": "shared_expert_intermediate_size" in hf,
        "expert_model_parallel_size": 2,
    }


def latent_sizes(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": hf["rope_parameters"]["rope_theta"],
        "rotary_scaling_factor": 1.0,
    }


def of_hybrids(hf: dict[str, Any]) -> dict[str, Any]:
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in hf["layer_types"]],
        "linear_conv_kernel_dim": hf["linear_conv_kernel_dim"],
        **{f"linear_{size}": hf[f"linear_{size}"] for size in sizes},
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "deterministic_mode": True,
    }


def of_stage(hf: dict[str, Any], experts: int | None, stage: int) -> TransformerBlockSubmodules:
    """The layers of one stage, as Megatron's own specification of hybrids, which needs Transformer
    Engine, has them.
    """
    specs, count = [], hf["num_hidden_layers"] // 2
    for index in range(stage * count, (stage + 1) * count):
        sparse = index not in hf.get("mlp_only_layers", ())
        spec = get_gpt_layer_local_spec(
            num_experts=experts if sparse else None, qk_layernorm=True, normalization="RMSNorm"
        )
        if hf["layer_types"][index] == "linear_attention":
            spec.submodules.self_attention = ModuleSpec(
                module=gated_delta_net.GatedDeltaNet,
                submodules=gated_delta_net.GatedDeltaNetSubmodules(
                    in_proj=ColumnParallelLinear,
                    out_norm=WrappedTorchNorm,
                    out_proj=RowParallelLinear,
                ),
            )
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)


def become(path: Path) -> tuple[GPTModel, dict[str, Any]]:
    """A model that holds the checkpoint's weights, each parameter filled by its name."""
    hf = json.loads((path / "config.json").read_text())
    model = build(hf)
    place = parallel_state
    tp = (place.get_tensor_model_parallel_rank(), 2)
    pp = (place.get_pipeline_model_parallel_rank(), 2)
    ep = (place.get_expert_model_parallel_rank(), 2)
    weights = unstacked(load_file(path / "model.safetensors"))
    mine = shard(
        weights, hf, tp=tp, pp=pp, ep=ep, etp=(0, 1), fused=False, vocabulary=PADDED
    )  # fmt: skip
    held = dict(named_weights(model))
    assert held.keys() == mine.keys(), held.keys() ^ mine.keys()
    with torch.no_grad():
        for name, parameter in held.items():
            assert parameter.shape == mine[name].shape, (name, parameter.shape)
            parameter.copy_(mine[name])
    return model, hf


def forward(ask: dict[str, Any]) -> dict[str, Any]:
    """Megatron's own logits of weights that it holds as nobody has laid them out, and these weights
    as ``MegatronSource`` gathers them, into the checkpoint at ``ask["path"]``.
    """
    path, place = Path(ask["path"]), parallel_state
    hf = json.loads((path / "config.json").read_text())
    model = build(hf).eval()
    stage = place.get_pipeline_model_parallel_rank()
    middle = 0.0 if hf["model_type"] in HYBRIDS else 1.0  # of norms
    for name, parameter in named_weights(model):
        cut = getattr(parameter, "tensor_model_parallel", False) or ".experts." in name
        shard = place.get_tensor_model_parallel_rank() if cut else 0
        where = 0 if name.startswith("embedding.") else stage  # of which heads have a copy
        seed = zlib.crc32(f"{where} {name} {shard}".encode())
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data = middle + drawn / 8 if parameter.dim() == 1 else drawn / 4
    ids = torch.tensor([ask["ids"]])
    positions = torch.arange(ids.shape[1])[None]
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
    with torch.no_grad():
        if stage == 0:
            hidden = model(ids, positions, mask)
            dist.send(hidden.contiguous(), place.get_pipeline_model_parallel_next_rank())
        else:
            hidden = torch.empty(ids.shape[1], 1, hf["hidden_size"])
            dist.recv(hidden, place.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
            made: list[torch.Tensor] = []  # of further tokens, then of the next one
            model.output_layer.register_forward_hook(  # losses are computed in place
                lambda *args: made.append(args[-1][0][:, 0].clone())
            )
            model(ids, positions, mask, labels=ids)
            if place.get_tensor_model_parallel_rank() == 0:
                rows = [logits[:, : hf["vocab_size"]].contiguous() for logits in made]
                save_file({"next": rows[-1], "further": rows[0].clone()}, path / "logits")
    dist.barrier()  # the first stage is long done, and waits for the others 30 s alone
    source = MegatronSource([model], config=hf)
    held = {own_name(name): tensor.clone() for name, tensor in source}
    if dist.get_rank() == 0:
        save_file(held, path / "model.safetensors", {"format": "pt"})
    dist.barrier()
    return {}


def answer(ask: dict[str, Any]) -> dict[str, Any]:
    if ask["op"] == "forward":
        return forward(ask)
    model, config = become(Path(ask["path"]))
    if dist.get_rank() == ask.get("odd_rank"):
        model.decoder.layers[0].mlp.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    dist.barrier()
    try:
        source = MegatronSource([model], config=config)
        with Rollout.connect(ask["address"]) as rollout:
            receipt = rollout.update_weights(source, transport=ask["transport"], bucket_bytes=65536)
    except RolloutError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"version": receipt.version}


def main() -> None:
    rank, world, port = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not mix with the answers
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    print(json.dumps({"ready": rank}), file=answers, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["op"] == "end":
            break
        print(json.dumps(answer(ask)), file=answers, flush=True)
    dist.destroy_process_group()


main()
