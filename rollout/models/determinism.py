"""What an engine that gives the same bits in any batch can be built from."""

from __future__ import annotations

from typing import Any

import torch

from rollout.errors import ConfigError
from rollout.kernels.gpu_support import triton_runs
from rollout.kernels.native import library, native_status
from rollout.kernels.paged_attention.cpu import MAX_DIM, MAX_GROUP, takes_heads
from rollout.models.layers.base import DETERMINISTIC_SIZES, Build


def check_deterministic(build: Build, foreign: Any = None) -> None:
    """Raise a ``ConfigError`` naming everything of ``build`` whose bits depend on the batch, or on
    the number of ranks.

    ``foreign``: the class of a model written elsewhere, if it is one.
    """
    config = build.config
    on_gpu = build.device.type == "cuda"
    wide = not takes_heads(config.num_heads, config.num_kv_heads, config.head_dim)
    checks = {
        f"device {build.device.type} (use 'cpu' or 'cuda')": build.device.type
        not in ("cpu", "meta", "cuda"),
        f"{build.dtype} (use float32 or bfloat16)": build.dtype
        not in (torch.float32, torch.bfloat16),
        f"tensor_parallel_size={build.tp.size} (use 1, 2 or 4)": build.tp.size
        not in DETERMINISTIC_SIZES,
        "mixtures of experts on a GPU": on_gpu and config.moe is not None,
        "experts in a narrower space": config.moe is not None and bool(config.moe.narrow),
        "latent attention": config.latent is not None,
        "layers with a recurrent state": bool(config.recurrent_layers),
        f"{foreign}, a model class from elsewhere": foreign is not None,
        f"attention heads of {config.head_dim}, {config.num_heads} over "
        f"{config.num_kv_heads} (at most {MAX_DIM}, {MAX_GROUP} to one)": wide,
        "a GPU without Triton": on_gpu and not triton_runs(),
        "norms that subtract the mean on a GPU": on_gpu and config.arch.norm == "layer",
        f"a machine without the native kernels ({native_status()})": not on_gpu
        and library() is None,
    }
    refused = [what for what, is_so in checks.items() if is_so]
    if refused:
        raise ConfigError(f"deterministic=True does not support {'; '.join(refused)}")
