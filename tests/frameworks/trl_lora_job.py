"""TRL's stock ``AsyncGRPOTrainer`` sends LoRA adapters over HTTP, three steps; prints JSON.

python trl_lora_job.py MODEL HTTP_URL GRPC_ADDRESS SCRATCH
"""

import json
import random
import sys

import requests
import torch
import trl_on_cpu  # noqa: F401 - stands in for what needs a card
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from rollout import Rollout
from rollout.integrations.trl import RolloutWorker

torch.set_num_threads(1)
model_path, url, address, scratch = sys.argv[1:]


def higher_is_better(completion_ids, **kwargs):
    return [sum(ids) / 1000 for ids in completion_ids]


syncs = []


class Watched(RolloutWorker):
    def update_model_version(self, model_version):
        """TRL calls it after each sync; then its own worker names the new adapter."""
        super().update_model_version(model_version)
        name = f"trl-policy-v{model_version}"
        asked = {
            "model": name, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 1.0, "top_p": 1.0,
            "top_k": 0, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0,
            "seed": random.getrandbits(63),
        }  # fmt: skip
        answer = requests.post(f"{url}/v1/completions", json=asked, timeout=60)
        answer.raise_for_status()
        [choice] = answer.json()["choices"]
        names = [card["id"] for card in requests.get(f"{url}/v1/models", timeout=60).json()["data"]]
        model = trainer.accelerator.unwrap_model(trainer.model)
        syncs.append({
            "equal": rollout.check_weights(model).equal,
            "named": answer.json()["model"] == name,
            "version": choice["weight_versions"][0]["version"],
            "norm": float(sum(p.detach().double().norm() for p in model.parameters())),
            "names": names,
            "label": rollout.weight_info().label,
        })  # fmt: skip


rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("Hello", "One two")]
with Rollout.connect(address) as rollout:
    worker = Watched(
        rollout, rows, higher_is_better, params={"max_tokens": 6},
        num_generations=4, max_inflight=8, queue_size=8,
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        model=model_path,
        processing_class=AutoTokenizer.from_pretrained(model_path),
        train_dataset=Dataset.from_list(rows),
        rollout_worker=worker,
        peft_config=LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0
        ),
        args=AsyncGRPOConfig(
            output_dir=scratch,
            vllm_server_base_url=url,
            use_cpu=True,
            bf16=False,
            max_steps=3,
            learning_rate=1e-2,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            max_staleness=1,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
ratios = [row["ratio"] for row in trainer.state.log_history if "ratio" in row]
print(json.dumps({"syncs": syncs, "ratios": ratios}), flush=True)
