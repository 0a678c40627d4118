"""verl's ``main_ppo`` as it is, two steps of GRPO over this engine; prints each step's metrics.

verl_main_job.py MODEL SCRATCH [OVERRIDE...]

Its defaults but for sizes, and for what a CPU needs (``verl_on_cpu``): the v1 trainer in sync mode,
two replicas that share the trainer's devices, made-up weights before the first sync, greedy
validation. Of the page's lines those for a rollout that is not apart.
"""

import os
import sys
from pathlib import Path

os.environ.update(
    VERL_USE_EXTERNAL_MODULES="frameworks.verl_on_cpu,rollout.integrations.verl",
    VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", VERL_FILE_LOGGER_PATH=f"{sys.argv[2]}/metrics",
    RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_DASHBOARD="1",
)  # fmt: skip

from datasets import Dataset
from frameworks.verl_on_cpu import documented, overrides
from verl.trainer import main_ppo

MODEL, SCRATCH, MORE = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(map(ord, solution_str)) % 97 / 97
"""
SIZES = f"""
data.train_files={SCRATCH}/rows.parquet
data.val_files={SCRATCH}/rows.parquet
data.train_batch_size=4
data.max_prompt_length=32
data.max_response_length=8
data.dataloader_num_workers=0
algorithm.adv_estimator=grpo
actor_rollout_ref.rollout.n=2
actor_rollout_ref.rollout.agent.num_workers=1
actor_rollout_ref.rollout.checkpoint_engine.backend=naive
reward.custom_reward_function.path={SCRATCH}/reward.py
reward.custom_reward_function.name=compute_score
reward.num_workers=1
trainer.logger=[file]
trainer.n_gpus_per_node=2
trainer.nnodes=1
trainer.total_training_steps=2
trainer.save_freq=-1
trainer.test_freq=2
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.default_local_dir={SCRATCH}/checkpoints
++ray_kwargs.ray_init.num_cpus=64
+ray_kwargs.ray_init.num_gpus=8
+ray_kwargs.ray_init.object_store_memory=100000000
+ray_kwargs.ray_init.include_dashboard=False
+ray_kwargs.ray_init.log_to_driver=False
""".split()


def row(number, text):
    return {
        "data_source": "toy", "prompt": [{"role": "user", "content": text}], "ability": "x",
        "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": number},
    }  # fmt: skip


(SCRATCH / "reward.py").write_text(REWARD)
rows = Dataset.from_list(
    [row(*each) for each in enumerate(["Hello", "One two", "What", "a b"] * 4)]
)
rows.to_parquet(f"{SCRATCH}/rows.parquet")
sys.argv[1:] = [*documented(), *overrides(MODEL), *SIZES, *MORE, f"hydra.run.dir={SCRATCH}"]
main_ppo.main()
print((SCRATCH / "metrics").read_text(), flush=True)
