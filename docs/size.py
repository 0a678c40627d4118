"""Print the lines of the package, by what came since a revision: the figures in architecture.md.

    python docs/size.py [REVISION]         # 709a0c9, unless another is named

Lines of Python, C, protobuf and HTML under rollout/ and proto/, comments and blank ones included.
What ``ADDED`` lists serves features that 709a0c9 had not; all the rest counts for those that it
had, also where these have grown.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from fnmatch import fnmatch

ADDED = {
    "TRL, verl, Megatron-Core, LoRA, colocated ranks, ops": """integrations/* trainer_ops/*
        weight_sync/trainer/sources/lora.py api/adapters.py server/http/adapters.py api/rank*.py
        engine/executors/external.py engine/executors/ray.py fleet/launching/ray_launcher.py""",
    "adapters served by themselves": """*/adapter*.py */*/adapter*.py */*/*/adapter*.py
        kernels/lora_linear/* kernels/native/lora.c
        loader/peft_adapter.py""",
    "scores, routed experts, sampling masks": """generation/*score* engine/score* server/http/score*
        generation/sampling_mask.py engine/expert_rows.py""",
    "journal, replay, diagnosis, limits of a stall": """*/journal.py */replay.py */diagnos*.py
        api/scored_samples.py engine/updates/limits.py weight_sync/protocol/rates.py""",
    "grammars": "engine/structured/* generation/grammar.py server/http/grammars.py",
    "hybrid and latent models, images, models by transformers": """models/*latent* kernels/*delta*
        models/*delta* models/layers/latent* models/layers/delta* kernels/causal_conv/*
        models/*mamba* models/layers/mamba* models/layers/conv* kernels/ssd_scan/*
        models/*chunks.py engine/state_* engine/snapshot.py models/transformers_* models/*vision*
        engine/images/* generation/images.py api/image_inputs.py models/text_config.py
        models/config/text.py models/held_tensors.py""",
    "several components at one commit": """models/components.py weights/components.py
        engine/worker/held_component.py weight_sync/trainer/sources/components.py""",
    "weights in fewer bits": """weights/files/scaled.py weights/files/mxfp4.py weights/*quant*
        weights/packed_rows.py weight_sync/trainer/sources/codes.py
        models/*quant* kernels/*quant*""",
    "fleets": """fleet/* cli/fleet* server/fleet* api/send_live.py
        engine/updates/read_lease.py""",
    "other dialects, sessions, chats with tools, embeddings, the page": """api/session*
        api/trajectory.py generation/chat_options.py generation/embedding.py cli/top.py
        server/sglang_verbs.py server/http/*""",
}
# Of server/http, what there was before the dialects.
OLD_HTTP = ("__init__", "answers", "app", "control", "dialect", "errors", "guard", "types")


def kind(path: str) -> str:
    inside = path.removeprefix("rollout/")
    if "_pb2" in path:
        return "generated"
    if inside in (f"server/http/{name}.py" for name in OLD_HTTP):
        return "what 709a0c9 had"
    for feature, patterns in ADDED.items():
        if any(fnmatch(inside, pattern) for pattern in patterns.split()):
            return feature
    return "what 709a0c9 had"


def git(*args: str) -> str:
    return subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout


def lines(revision: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in git("ls-tree", "-r", "--name-only", revision, "rollout", "proto").split():
        if path.endswith((".py", ".pyi", ".c", ".h", ".proto", ".html")):
            found[kind(path)] += git("show", f"{revision}:{path}").count("\n")
    return found


def main(revision: str = "709a0c9") -> None:
    before, now = lines(revision), lines("HEAD")
    print(f"{revision:>8} {git('rev-parse', '--short=7', 'HEAD').strip():>8}")
    for name in ("what 709a0c9 had", *ADDED, "generated"):
        print(f"{before[name]:8} {now[name]:8}  {name}")
    print(f"{before.total():8} {now.total():8}  all")


if __name__ == "__main__":
    main(*sys.argv[1:])
