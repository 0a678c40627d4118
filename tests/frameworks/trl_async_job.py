"""TRL's stock ``AsyncGRPOTrainer`` over our two seams, three steps; prints one JSON object.

python trl_async_job.py MODEL SCRATCH
"""

import json
import sys

import torch
import trl_on_cpu  # noqa: F401 - stands in for what needs a card
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from rollout import Rollout
from rollout.integrations.trl import RolloutWorker, WeightTransfer

torch.set_num_threads(1)
model_path, scratch = sys.argv[1:]


def higher_is_better(completion_ids, **kwargs):  # no two samples alike: each step has advantages
    return [sum(ids) / 1000 for ids in completion_ids]


syncs, weights, played = [], {}, []


class Watched(WeightTransfer):
    def resume(self):
        super().resume()
        version = self.receipts[-1].version
        model = trainer.accelerator.unwrap_model(trainer.model)
        weights[version] = {name: value.clone() for name, value in model.state_dict().items()}
        norm = float(sum(p.detach().double().norm() for p in model.parameters()))
        equal = rollout.check_weights(model).equal
        syncs.append({"equal": equal, "version": version, "norm": norm})


class Worker(RolloutWorker):
    def _sample(self, trajectory, *rest):
        sample = super()._sample(trajectory, *rest)
        played.append((trajectory, sample.model_version))
        return sample


def play(session, row, params):
    """Two turns: the second is about the first one's answer."""
    session.chat(row["prompt"], params)
    session.chat([{"role": "tool", "content": "8"}], params)


rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("Hello", "One two")]
with Rollout(model_path, device="cpu", num_threads=1, num_kv_blocks=128) as rollout:
    worker = Worker(
        rollout, rows, higher_is_better, params={"max_tokens": 6}, play=play,
        num_generations=4, max_inflight=8, queue_size=8,
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        model=model_path,
        processing_class=AutoTokenizer.from_pretrained(model_path),
        train_dataset=Dataset.from_list(rows),
        rollout_worker=worker,
        weight_transfer=Watched(rollout, in_flight="recompute"),
        args=AsyncGRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            max_steps=3,
            learning_rate=1e-3,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            token_budget=0,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()

largest, tokens, versions = 0.0, 0, set()
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
for trajectory, model_version in list(played):
    found = trajectory.weight_versions[trajectory.mask]
    assert model_version == int(found.min()) - syncs[0]["version"] + 1
    ids = torch.cat([trajectory.prompt_token_ids, trajectory.token_ids])
    for version in sorted(set(found.tolist())):
        model.load_state_dict(weights[version])
        with torch.no_grad():
            logits = model(ids[None]).logits[0].float().log_softmax(-1)
        start = len(trajectory.prompt_token_ids)
        logprobs = logits[start - 1 : -1].gather(-1, trajectory.token_ids[:, None])[:, 0]
        mine = trajectory.weight_versions == version
        difference = (logprobs - trajectory.processed_logprobs)[mine].abs().max()
        largest = max(largest, float(difference))
        tokens += int(mine.sum())
        versions.add(version)
rows = [row for row in trainer.state.log_history if "ratio" in row]
summary = {"syncs": syncs, "rows": rows, "largest": largest, "tokens": tokens}
print(json.dumps({**summary, "versions": sorted(versions)}), flush=True)
