"""The demo's task and its objective, against what they are by definition."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from addition_task import (
    END,
    PAD,
    Problem,
    encode,
    expected_reward,
    make_model,
    make_tokenizer,
    problems,
    reward,
    save_checkpoint,
    warm_up,
)
from display import draw
from driver import GOOD, missed_goals, wanted_reward
from grpo import (
    Sample,
    advantages,
    clipped_loss,
    largest_difference,
    make_batch,
    scheduled_lr,
    token_logprobs,
)
from transformers import AutoTokenizer


def test_the_sum_is_written_units_first_and_only_it_is_rewarded() -> None:
    problem = Problem(37, 85)
    assert problem.prompt == encode("37+85=")
    assert problem.answer == [*encode("221"), END]
    assert reward(problem, [*encode("221"), END]) == 1.0
    assert reward(problem, encode("221")) == 0.0
    assert reward(problem, [*encode("122"), END]) == 0.0
    assert Problem(3, 4).prompt == encode("03+04=")


def test_the_checkpoints_tokenizer_reads_and_writes_the_same_ids(tmp_path) -> None:
    save_checkpoint(make_model(layers=1), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("37+85=")["input_ids"] == encode("37+85=")
    assert tokenizer.decode([*encode("221"), END], skip_special_tokens=True) == "221"
    assert make_tokenizer().eos_token_id == END


def test_expected_reward_is_the_probability_of_the_answer() -> None:
    torch.manual_seed(0)
    model = make_model(layers=1)
    asked = [Problem(12, 34), Problem(99, 99)]
    by_hand = []
    for problem in asked:
        ids = torch.tensor([problem.prompt + problem.answer])
        logprobs = token_logprobs(model, ids)[0, len(problem.prompt) :]
        by_hand.append(float(logprobs.detach().sum().exp()))
    assert expected_reward(model, asked) == pytest.approx(sum(by_hand) / 2, rel=1e-4)


def test_warm_up_stops_at_its_target() -> None:
    steps, value = warm_up(make_model(layers=1), target=0.0, seed=0, max_steps=50)
    assert (steps, value >= 0.0) == (5, True)


def test_advantages_are_relative_to_the_group() -> None:
    values = advantages([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], group=2).view(3, 2)
    assert values.sum(1).tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-5)
    assert values[0, 0] > 0 > values[0, 1]
    assert values[1:].abs().max() == 0  # all equal: nothing to learn


def test_the_loss_is_clipped_on_the_side_that_would_go_too_far() -> None:
    samples = [Sample([1, 2], [3], [-1.0], 1.0), Sample([1, 2], [4], [-1.0], 0.0)]
    batch = make_batch(samples, 2, PAD)
    for shift, moves in ((0.0, True), (1.0, False)):
        logprobs = torch.full(batch.ids.shape, -1.0 + shift)
        logprobs[1] = -1.0 - shift  # the good answer likelier, the bad one less likely
        logprobs.requires_grad_()
        clipped_loss(batch, logprobs, 0.2).backward()
        assert logprobs.grad is not None
        assert (logprobs.grad[batch.mask].abs().max() > 0) == moves
        assert logprobs.grad[~batch.mask].abs().max() == 0


def test_the_difference_counts_sampled_tokens_only() -> None:
    batch = make_batch([Sample([1, 2], [3, 4], [-1.0, -2.0], 1.0)], 1, PAD)
    logprobs = torch.tensor([[9.0, 9.0, -1.0, -2.5]])
    assert largest_difference(batch, logprobs) == pytest.approx(0.5)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [scheduled_lr(1.0, step, 100) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert 0.1 < rates[-1] < 0.12


def test_problems_depend_on_the_seed_alone() -> None:
    assert problems(5, random.Random("a")) == problems(5, random.Random("a"))
    assert problems(5, random.Random("a")) != problems(5, random.Random("b"))


def test_each_goal_can_be_missed() -> None:
    good = {
        "reward_first": 0.42,
        "reward_last": 0.85,
        "steps": 100,
        "version_first": 0,
        "version_last": 100,
        "max_logprob_diff": 1e-6,
        "weights_equal": True,
    }
    assert missed_goals(good) == []
    assert len(missed_goals(good | {"weights_equal": False})) == 1
    assert len(missed_goals(good | {"reward_last": 0.82})) == 1
    assert len(missed_goals(good | {"reward_first": 0.3, "reward_last": 0.8})) == 1
    assert len(missed_goals(good | {"version_last": 99})) == 1
    assert len(missed_goals(good | {"max_logprob_diff": 2e-4})) == 1
    assert len(missed_goals(good | {"max_logprob_diff": 1e-7, "deterministic": True})) == 1


@pytest.mark.parametrize("gain", [1.2, 1.5, 2.0])
def test_a_start_that_is_too_good_to_grow_so_much_can_meet_the_goals(gain: float) -> None:
    assert wanted_reward(0.38, gain) == gain * 0.38
    summary = {"steps": 1, "version_first": 0, "version_last": 1, "weights_equal": True}
    summary["max_logprob_diff"] = 1e-6
    for first, last in ((0.81, GOOD), (0.95, 0.95), (1.0, 1.0)):
        reached = summary | {"reward_first": first, "reward_last": last}
        assert missed_goals(reached, gain=gain) == []
        # Still, it must not fall, nor stay where there is more to learn.
        assert len(missed_goals(reached | {"reward_last": last - 0.01}, gain=gain)) == 1


def test_without_matplotlib_there_is_no_picture_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw([], tmp_path / "reward.png", "grpo").startswith("no picture: it needs matplotlib")
    assert not any(tmp_path.iterdir())
