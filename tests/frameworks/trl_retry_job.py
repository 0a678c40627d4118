"""TRL's own client, behind a proxy that loses a reply to each of its weight verbs.

python trl_retry_job.py MODEL HTTP_ADDRESS GRPC_ADDRESS; prints one JSON object at the end.
"""

import json
import socket
import sys

import torch
from proxies import Proxy
from transformers import AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient

from rollout import Rollout

torch.set_num_threads(1)
model_path, http_address, grpc_address = sys.argv[1:]
with socket.create_server(("127.0.0.1", 0)) as sock:
    group_port = sock.getsockname()[1]

model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
model.tie_weights()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(1.5)
verbs = ("init_weight_transfer_engine", "start_weight_update", "update_weights",
         "update_weights", "finish_weight_update")  # fmt: skip
with Proxy(http_address) as proxy, Rollout.connect(grpc_address) as rollout:
    client = VLLMClient(base_url=f"http://{proxy.address}", group_port=group_port)
    proxy.lose += [b"POST /" + verb.encode() for verb in verbs]
    client.init_communicator(device="cuda")  # its weight path asks for the word, and no more
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data)
    good = rollout.receipts()[-1]
    equal = rollout.check_weights(model).equal
    why = ""
    try:
        with client.weight_update():
            client.update_named_param("model.nonsense.weight", torch.ones(3))
    except Exception as error:
        why = str(error)
    print(
        json.dumps(
            {
                "lost": proxy.lost,
                "left": len(proxy.lose),
                "version": good.version,
                "equal": equal,
                "why": why,
                "after": rollout.weight_version,
            }
        ),
        flush=True,
    )
