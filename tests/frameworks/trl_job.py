"""TRL's stock ``GRPOTrainer`` against a server, two steps; prints one JSON object at the end.

python trl_job.py MODEL HTTP_URL GRPC_ADDRESS TOKEN SCRATCH
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_server import make_trainer, train

from rollout import Rollout

model_path, url, grpc_address, token, scratch = sys.argv[1:]
trainer = make_trainer(
    AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
    AutoTokenizer.from_pretrained(model_path),
    [{"prompt": "Hello, world! How"}, {"prompt": "One two"}],
    url,
    scratch,
    temperature=0.7,
)
with Rollout.connect(grpc_address, token) as rollout:
    print(json.dumps(train(trainer, rollout)), flush=True)
