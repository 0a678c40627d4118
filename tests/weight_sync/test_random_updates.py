"""Random courses of updates: what is live is what a fresh start from the same weights leaves.

A course draws an architecture, how its linears are held, its ranks, what a rollback goes back by,
and whether a draft lies beside the policy; then updates from whatever a trainer may hold, in full
or as changes, some of them partial, and rollbacks between them.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import Engine, same
from quantized_files import write_release
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, write_tiny
from trainer import Trainer

from rollout.errors import ConfigError
from rollout.loader import open_checkpoint
from rollout.models.config.model import ModelConfig

SCHEMES = ("none", "int8", "fp8", "fp8_block", "mxfp4")
RELEASED = ("int8", "fp8", "fp8_block")  # of which files have codes and scales
# Whose codes and scales of blocks two ranks can share.
DENSE: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 256,
    "intermediate_size": 256, "num_layers": 1,
}  # fmt: skip


class Course:
    def __init__(self, seed: int, where: Path) -> None:
        self.draw, self.where = random.Random(seed), where
        torch.manual_seed(seed)
        chance = self.draw.random
        self.scheme, self.layout = self.draw.choice(SCHEMES), self.draw.choice(("plain", "tiles"))
        self.has_codes = self.scheme in RELEASED and chance() < 0.5
        self.arch = "qwen3" if self.has_codes else self.draw.choice(list(ARCHITECTURES))
        self.undo = self.draw.choice(("shadow", "sparse", "host"))
        dtype = self.draw.choice((torch.float32, torch.bfloat16))
        shape = DENSE if self.has_codes else {}
        components = ("policy", "draft") if chance() < 0.4 else ("policy",)
        self.paths = {name: where / name for name in components}  # of what is live
        self.modules = {
            name: write_tiny(path, self.arch, seed=number, dtype=dtype, **shape)
            for number, (name, path) in enumerate(self.paths.items())
        }
        self.before: dict[str, Path] | None = None  # where a rollback leads
        self.is_synced = True  # the policy's module has what is live
        self.size = self.draw.choice((1, 2, 2, 4))
        self.engine = self.begun()
        self.trainers: dict[str, Trainer] = {}
        self.said: list[Any] = []

    def begun(self) -> Engine:
        """With fewer ranks, and plain weights, where the model cannot be held as was drawn."""
        for size, scheme in ((self.size, self.scheme), (1, self.scheme)):
            self.size, self.scheme = size, scheme
            try:
                return self.fresh()
            except ConfigError:
                continue
        self.scheme = "none"
        return self.fresh()

    def fresh(self) -> Engine:
        config, draft = ModelConfig.from_directory(self.paths["policy"]), self.paths.get("draft")
        with (
            open_checkpoint(str(self.paths["policy"])) as policy,
            open_checkpoint(str(draft or self.paths["policy"])) as other,
        ):
            return Engine(
                *(config, self.size, policy, self.layout, self.undo),
                beside=draft and {"draft": other},
                quantization=self.scheme,
            )

    def run(self) -> None:
        try:
            for number in range(self.draw.randint(2, 6)):
                if self.before is not None and self.draw.random() < 0.2:
                    self.go_back()
                else:
                    self.update(number)
                self.check()
        finally:
            self.engine.close()

    def check(self) -> None:
        wanted = self.fresh()
        try:
            assert same(self.engine.live(), wanted.live()), self.told()
            assert self.engine.digests(10.0) == wanted.digests(10.0), self.told()
        finally:
            wanted.close()

    def told(self) -> str:
        held = f"{self.arch} {self.scheme} {self.layout} {self.undo}, {self.size} ranks"
        return "\n".join(map(str, (held, *self.said)))

    def go_back(self) -> None:
        assert self.before is not None
        self.said.append("rollback")
        self.engine.rollback(10.0)
        self.paths, self.before = self.before, None
        self.is_synced = False

    def update(self, number: int) -> None:
        components = self.draw.choice([("policy",), tuple(self.paths), tuple(self.paths)[-1:]])
        staging = self.draw.choice(("auto", "auto", "device", "none"))
        encoding = "full" if staging == "none" else self.draw.choice(("auto", "full", "delta"))
        transport = self.draw.choice(("inline", "ipc", "broadcast"))
        paths, sources, partial = dict(self.paths), {}, False
        for name in components:
            paths[name] = self.where / f"{name}{number}"
            if name == "policy" and self.has_codes and self.draw.random() < 0.5:
                write_release(paths[name], self.scheme, self.arch, seed=number, **DENSE)
                files = load_file(paths[name] / "model.safetensors")
                sources[name] = self.draw.choice((str(paths[name]), files, iter(files.items())))
                self.is_synced = False
                continue
            changed = self.trained(name, paths[name])
            partial = components == ("policy",) and self.is_synced and self.draw.random() < 0.3
            partial &= bool(changed)  # of nothing nothing can be sent
            sources[name] = self.source_of(name, paths[name], changed if partial else None)
            self.is_synced |= name == "policy"
        is_bare = components == ("policy",) and self.draw.random() < 0.6
        options = {"encoding": encoding, "staging": staging, "partial": partial}
        self.said.append((transport, options, {n: type(s).__name__ for n, s in sources.items()}))
        trainer = self.trainers.setdefault(transport, Trainer(self.engine, transport))
        trainer.send(sources["policy"] if is_bare else sources, **options)
        self.before = None if staging == "none" else self.paths
        self.paths = paths

    def trained(self, name: str, path: Path) -> set[str]:
        """What a step has changed of a module; it is saved as well."""
        module, share, changed = self.modules[name], self.draw.choice((0.1, 0.5, 1.0)), set()
        for parameter, values in module.named_parameters():
            if self.draw.random() < share:
                some = torch.rand(values.shape) < self.draw.choice((0.001, 0.05, 1.0))
                values.data += 0.125 * some.to(values.dtype)
                changed.add(parameter)
        module.save_pretrained(path)
        for file in (self.where / name).iterdir():  # what a checkpoint has beside its weights
            if not (path / file.name).exists():
                shutil.copy(file, path)
        return changed

    def source_of(self, name: str, path: Path, alone: set[str] | None) -> Any:
        """One of what a trainer may pass; ``alone``: the tensors that it has to have."""
        module = self.modules[name]
        weights = module.state_dict()
        if alone is not None:
            weights = {n: t for n, t in weights.items() if n in alone or self.draw.random() < 0.2}
        kinds: list[Callable[[], Any]] = [
            lambda: dict(weights),
            lambda: list(weights.items()),
            lambda: iter(weights.items()),
        ]
        if alone is None:
            kinds += [lambda: module, lambda: str(path)]
        return self.draw.choice(kinds)()


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 1500), marks=pytest.mark.soak)]
)
@pytest.mark.more
@pytest.mark.timeout(900)
def test_updates_leave_what_a_fresh_start_leaves(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        where = tmp_path / str(seed)
        Course(seed, where).run()
        shutil.rmtree(where)
