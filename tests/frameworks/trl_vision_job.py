"""TRL's stock ``GRPOTrainer`` on images against a server, two steps; prints one JSON object.

python trl_vision_job.py MODEL HTTP_URL GRPC_ADDRESS TOKEN SCRATCH
"""

import json
import sys

import torch
from tiny_vision import END, PAD, START, picture, processor
from transformers import AutoTokenizer, ProcessorMixin, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from trl_server import make_trainer, train

from rollout import Rollout

model_path, url, grpc_address, token, scratch = sys.argv[1:]


class ImagesAlone(Qwen3VLProcessor):
    """Qwen's processor without its videos, which need torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.image_token_id = "<|image_pad|>", PAD
        self.video_token, self.video_token_id = "<unused0>", PAD - 2
        self.vision_start_token, self.vision_start_token_id = "<|vision_start|>", START
        self.vision_end_token, self.vision_end_token_id = "<|vision_end|>", END
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def example(seed):
    prompt = [{"role": "user", "content": "What is it?"}]
    return {"prompt": prompt, "images": [picture(seed, 21 + 9 * seed, 30)]}


tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
trainer = make_trainer(
    Qwen3VLForConditionalGeneration.from_pretrained(model_path, dtype=torch.float32),
    ImagesAlone(processor(), tokenizer, tokenizer.chat_template),
    [example(0), example(1)],
    url,
    scratch,
    temperature=1.0,
    generation_kwargs={"logit_bias": {str(PAD): -100}},  # never a part of an image
)
tower = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if ".visual." in n}
with Rollout.connect(grpc_address, token) as rollout:
    got = train(trainer, rollout)
    got["images"] = rollout.metrics().encoder_cache_queries_total
now = dict(trainer.model.named_parameters())
got["moved"] = sum(not torch.equal(now[name], before) for name, before in tower.items())
print(json.dumps(got), flush=True)
