"""TRL's ``GRPOTrainer`` against a server, two steps on a CPU: what its jobs here share."""

import socket
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

from rollout import Rollout

torch.set_num_threads(1)

# The weight path of TRL asks for the device type "cuda", and never touches a device of that name.
init_communicator = VLLMClient.init_communicator
VLLMClient.init_communicator = lambda self, device: init_communicator(self, device="cuda")


def higher_is_better(completion_ids, **kwargs):  # no two samples alike: each step has advantages
    return [sum(ids) / 1000 for ids in completion_ids]


def make_trainer(model: Any, processor: Any, rows: list, url: str, scratch: str, **config: Any):
    """``config``: what a ``GRPOConfig`` has beside what both have here."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        group_port = sock.getsockname()[1]
    return GRPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=higher_is_better,
        train_dataset=Dataset.from_list(rows * 2),
        args=GRPOConfig(
            output_dir=scratch, use_cpu=True, bf16=False, max_steps=2, learning_rate=1e-3,
            per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
            use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
            vllm_group_port=group_port, **config,
        ),
    )  # fmt: skip


def train(trainer: Any, rollout: Rollout) -> dict[str, list]:
    """What was found after each sync, and the log's rows."""
    sync_weights, syncs = trainer.vllm_generation.sync_weights, []

    def watched():
        sync_weights()
        report = rollout.check_weights(trainer.model)
        norm = float(sum(p.detach().double().norm() for p in trainer.model.parameters()))
        syncs.append({"equal": report.equal, "version": rollout.weight_version, "norm": norm})

    trainer.vllm_generation.sync_weights = watched
    trainer.train()
    watched()
    return {"syncs": syncs, "rows": [row for row in trainer.state.log_history if "loss" in row]}
