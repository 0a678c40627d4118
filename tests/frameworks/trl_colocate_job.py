"""TRL's stock ``GRPOTrainer(vllm_mode="colocate")``, three steps; prints one JSON object a rank.

    trl_colocate_job.py MODEL SCRATCH SLEEP      alone, or under torchrun: tensor parallel then

After each sync the engine's weights are compared with the trainer's, and each sampled token's
logprob with transformers' of those weights.
"""

import json
import os
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rollout.integrations.trl_colocate import colocate

torch.set_num_threads(1)
model_path, scratch, sleep = sys.argv[1:]
size = int(os.environ.get("WORLD_SIZE", "1"))
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)


def higher_is_better(completion_ids, **kwargs):  # no two samples alike: each step has advantages
    return [sum(ids) / 1000 for ids in completion_ids]


colocate(device="cpu", num_threads=1, num_kv_blocks=64, dtype="float32")
trainer = GRPOTrainer(
    model=model,
    processing_class=AutoTokenizer.from_pretrained(model_path),
    reward_funcs=higher_is_better,
    train_dataset=Dataset.from_list([{"prompt": "Hello, world! How"}, {"prompt": "One two"}] * 4),
    args=GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, max_steps=3, learning_rate=1e-3,
        per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
        temperature=0.7, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=size,
        vllm_enable_sleep_mode=sleep == "sleep",
    ),
)  # fmt: skip
llm, found = trainer.vllm_generation.llm, {"syncs": [], "differences": []}
sync, generate = trainer.vllm_generation.sync_weights, trainer.vllm_generation.llm.generate


def watched_sync():
    sync()
    norm = float(sum(p.detach().double().norm() for p in model.parameters()))
    report = llm.rollout.check_weights(model.state_dict())
    found["syncs"].append({"equal": report.equal, "norm": norm, "digest": llm.receipts[-1].digest})


def watched_generate(prompts, **kwargs):
    outputs = generate(prompts, **kwargs)
    for output in outputs:
        [sample] = output.outputs
        ids = torch.tensor([output.prompt_token_ids + sample.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1] / 0.7
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        given = [
            by[token].logprob for by, token in zip(sample.logprobs, sample.token_ids, strict=True)
        ]
        found["differences"].append(float((torch.tensor(given) - wanted).abs().max()))
    found["last"] = [output.outputs[0].token_ids for output in outputs]
    return outputs


trainer.vllm_generation.sync_weights, llm.generate = watched_sync, watched_generate
trainer.train()
found["rows"] = [row for row in trainer.state.log_history if "loss" in row]
# A sync that fails: the weights hold NaN. It raises from TRL's own call, and the old ones serve on.
before = llm.receipts[-1].version
with torch.no_grad():
    next(model.parameters())[0, 0] = float("nan")
try:
    sync()
except Exception as error:
    found["failed"] = f"{type(error).__name__}: {error}"
found["kept"] = llm.rollout.weight_version == before
llm.rollout.shutdown()
print(json.dumps(found), flush=True)
