"""The demo's task: two-digit addition, the sum written units digit first ("37+85=" -> "221").

    python trainer_examples/addition_task.py demo_output/start [--target 0.8]

makes a checkpoint that knows some of it, which the README's examples use. Characters are tokens. A
sample earns 1 when it is exactly the sum's digits followed by the end token, else 0: no partial
credit.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+="
END, PAD = len(CHARACTERS), len(CHARACTERS) + 1
VOCAB_SIZE = 16
MAX_NEW_TOKENS = 4  # at most three digits and the end token
IGNORE = -100


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum; ``prompt`` and ``answer`` are token ids, the answer with its end token."""

    a: int
    b: int

    @property
    def prompt(self) -> list[int]:
        return encode(f"{self.a:02d}+{self.b:02d}=")

    @property
    def answer(self) -> list[int]:
        return [*encode(str(self.a + self.b)[::-1]), END]


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(c) for c in text]


def problems(count: int, rng: random.Random) -> list[Problem]:
    """``count`` sums drawn uniformly; the caller's ``rng`` decides which."""
    return [Problem(rng.randrange(100), rng.randrange(100)) for _ in range(count)]


def reward(problem: Problem, token_ids: Sequence[int]) -> float:
    """1.0 for exactly the digits of the sum and the end token, else 0.0."""
    return float(list(token_ids) == problem.answer)


def make_model(seed: int = 0, layers: int = 5) -> Qwen3ForCausalLM:
    """A Qwen3 of about 2 M parameters in float32, with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.do_sample = False
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, so that the checkpoint also answers text."""
    vocab = {c: i for i, c in enumerate(CHARACTERS)} | {"<end>": END, "<pad>": PAD}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def save_checkpoint(model: Qwen3ForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def answer_batch(batch: Sequence[Problem]) -> tuple[Tensor, Tensor]:
    """Inputs and next-token labels [problems, tokens], right-padded; prompts are not scored."""
    rows = [(p.prompt, p.answer) for p in batch]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), PAD)
    labels = torch.full((len(rows), width), IGNORE)
    for i, (prompt, answer) in enumerate(rows):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
    return ids, labels


@torch.no_grad()
def expected_reward(model: nn.Module, batch: Sequence[Problem]) -> float:
    """Mean probability that sampling at temperature 1 writes exactly the answer."""
    ids, labels = answer_batch(batch)
    logits = model(ids).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return float((-losses.view_as(ids).sum(1)).exp().mean())


def warm_up(
    model: Qwen3ForCausalLM, *, target: float, seed: int, max_steps: int, lr: float = 5e-4
) -> tuple[int, float]:
    """Supervised steps until the expected reward reaches ``target``; returns (steps, reward)."""
    rng = random.Random(f"warm-up-{seed}")
    held_out = problems(512, random.Random(f"warm-up-check-{seed}"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    value, step = 0.0, 0
    for step in range(1, max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 50)
        ids, labels = answer_batch(problems(128, rng))
        logits = model(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0 and (value := expected_reward(model, held_out)) >= target:
            break
        if step % 25 == 0:
            print(f"step {step}: mean reward {value:.2f} of {target:g}", file=sys.stderr)
    return step, value


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the checkpoint goes")
    parser.add_argument("--target", type=float, default=0.8, help="mean reward to reach")
    parser.add_argument("--layers", type=int, default=5, help="of the model")
    parser.add_argument("--steps", type=int, default=1000, help="supervised, at most")
    args = parser.parse_args()
    model = make_model(layers=args.layers)
    steps, reached = warm_up(model, target=args.target, seed=0, max_steps=args.steps)
    save_checkpoint(model, args.directory)
    print(f"{args.directory}: mean reward {reached:.2f} after {steps} supervised steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
