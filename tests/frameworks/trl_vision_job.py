"""TRL's stock ``GRPOTrainer`` on images against a server, two steps; prints one JSON object.

python trl_vision_job.py MODEL HTTP_URL GRPC_ADDRESS TOKEN SCRATCH
"""

import json
import socket
import sys

import torch
from datasets import Dataset
from tiny_vision import END, PAD, START, picture, processor
from transformers import AutoTokenizer, ProcessorMixin, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

from rollout import Rollout

torch.set_num_threads(1)
model_path, url, grpc_address, token, scratch = sys.argv[1:]

# The weight path of TRL asks for the device type "cuda", and never touches a device of that name.
init_communicator = VLLMClient.init_communicator
VLLMClient.init_communicator = lambda self, device: init_communicator(self, device="cuda")

with socket.create_server(("127.0.0.1", 0)) as sock:
    group_port = sock.getsockname()[1]


class ImagesAlone(Qwen3VLProcessor):
    """Qwen's processor without its videos, which need torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.image_token_id = "<|image_pad|>", PAD
        self.video_token, self.video_token_id = "<unused0>", PAD - 2
        self.vision_start_token, self.vision_start_token_id = "<|vision_start|>", START
        self.vision_end_token, self.vision_end_token_id = "<|vision_end|>", END
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def higher_is_better(completion_ids, **kwargs):  # no two samples alike: each step has advantages
    return [sum(ids) / 1000 for ids in completion_ids]


def example(seed):
    prompt = [{"role": "user", "content": "What is it?"}]
    return {"prompt": prompt, "images": [picture(seed, 21 + 9 * seed, 30)]}


tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
trainer = GRPOTrainer(
    model=Qwen3VLForConditionalGeneration.from_pretrained(model_path, dtype=torch.float32),
    processing_class=ImagesAlone(processor(), tokenizer, tokenizer.chat_template),
    reward_funcs=higher_is_better,
    train_dataset=Dataset.from_list([example(0), example(1)] * 2),
    args=GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        max_steps=2,
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        temperature=1.0,
        generation_kwargs={"logit_bias": {str(PAD): -100}},  # never a part of an image
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=group_port,
    ),
)
tower = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if ".visual." in n}
syncs = []
with Rollout.connect(grpc_address, token) as rollout:
    sync_weights = trainer.vllm_generation.sync_weights

    def watched():
        sync_weights()
        report = rollout.check_weights(trainer.model)
        syncs.append({"equal": report.equal, "version": rollout.weight_version})

    trainer.vllm_generation.sync_weights = watched
    trainer.train()
    watched()
    figures = rollout.metrics()
    images = figures.encoder_cache_queries_total
moved = sum(not torch.equal(p, tower[n]) for n, p in trainer.model.named_parameters() if n in tower)
rows = [row for row in trainer.state.log_history if "loss" in row]
print(json.dumps({"syncs": syncs, "rows": rows, "moved": moved, "images": images}), flush=True)
