"""What trainers, servers and ranks import; nothing that starts a thread, as they are forked."""

import gc

import safetensors.torch  # noqa: F401
import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from transformers import AutoModelForCausalLM  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

import rollout.cli.main
import rollout.engine.worker.rank_process
import rollout.rpc.client
import rollout.server.service
import rollout.testing.faults
import rollout.weight_sync.trainer.publisher  # noqa: F401

torch.set_num_threads(1)
gc.freeze()  # all of it stays: a search for garbage of each child would copy its pages
