"""TRL's stock ``AsyncGRPOTrainer`` over our two seams, three steps; prints one JSON object.

python trl_async_job.py MODEL SCRATCH
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM
from trl_on_cpu import ROWS, SAMPLING, higher_is_better, make_trainer, norm, trained

from rollout import Rollout
from rollout.integrations.trl import RolloutWorker, WeightTransfer

model_path, scratch = sys.argv[1:]
syncs, weights, played = [], {}, []


class Watched(WeightTransfer):
    def resume(self):
        super().resume()
        version = self.receipts[-1].version
        model = trained(trainer)
        weights[version] = {name: value.clone() for name, value in model.state_dict().items()}
        equal = rollout.check_weights(model).equal
        syncs.append({"equal": equal, "version": version, "norm": norm(model)})


class Worker(RolloutWorker):
    def _sample(self, trajectory, *rest):
        sample = super()._sample(trajectory, *rest)
        played.append((trajectory, sample.model_version))
        return sample


def play(session, row, params):
    """Two turns: the second is about the first one's answer."""
    session.chat(row["prompt"], params)
    session.chat([{"role": "tool", "content": "8"}], params)


with Rollout(model_path, device="cpu", num_threads=1, num_kv_blocks=128) as rollout:
    worker = Worker(
        rollout, ROWS, higher_is_better, params={"max_tokens": 6}, play=play, **SAMPLING
    )
    trainer = make_trainer(
        model_path, scratch, worker, weight_transfer=Watched(rollout, in_flight="recompute"),
        config={"learning_rate": 1e-3, "token_budget": 0},
    )  # fmt: skip
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
