"""TRL's stock ``AsyncGRPOTrainer`` sends LoRA adapters over HTTP, three steps; prints JSON.

python trl_lora_job.py MODEL HTTP_URL GRPC_ADDRESS SCRATCH
"""

import json
import random
import sys

import requests
from peft import LoraConfig
from trl_on_cpu import ROWS, SAMPLING, higher_is_better, make_trainer, norm, trained

from rollout import Rollout
from rollout.integrations.trl import RolloutWorker

model_path, url, address, scratch = sys.argv[1:]
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
        model = trained(trainer)
        syncs.append({
            "equal": rollout.check_weights(model).equal,
            "adapter": choice.get("adapter"),
            "named": answer.json()["model"] == name,
            "version": choice["weight_versions"][0]["version"],
            "norm": norm(model),
            "names": names,
            "label": rollout.weight_info().label,
        })  # fmt: skip


adapter = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0
)
with Rollout.connect(address) as rollout:
    worker = Watched(rollout, ROWS, higher_is_better, params={"max_tokens": 6}, **SAMPLING)
    trainer = make_trainer(
        model_path, scratch, worker, peft_config=adapter,
        config={"learning_rate": 1e-2, "max_staleness": 1, "vllm_server_base_url": url},
    )  # fmt: skip
    trainer.train()
ratios = [row["ratio"] for row in trainer.state.log_history if "ratio" in row]
print(json.dumps({"syncs": syncs, "ratios": ratios}), flush=True)
