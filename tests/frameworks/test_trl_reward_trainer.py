"""A reward model that TRL's own ``RewardTrainer`` trains and saves, served and updated."""

import pytest
import torch
from tiny_models import write_tiny

from rollout import Rollout

PAIR = {
    side: [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
    for side, text in (("chosen", "One two three"), ("rejected", "I am fine"))
}
ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 256}


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*use_reentrant:UserWarning")
def test_what_it_saves_is_served_and_its_module_updates_to_the_same_bits(tmp_path):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    start, out = tmp_path / "start", tmp_path / "out"
    model = write_tiny(start, labels=1, tokenizer=True)
    config = RewardConfig(
        output_dir=str(out), max_steps=2, per_device_train_batch_size=2, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    trainer = RewardTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([PAIR] * 4),
        processing_class=AutoTokenizer.from_pretrained(start),
    )
    trainer.train()
    trainer.save_model(str(out))
    trainer.model.eval()
    with Rollout(str(out), **ENGINE, task="reward") as fresh:
        rewards = [fresh.classify(PAIR[side])[0] for side in PAIR]
        assert rewards[0].reward > rewards[1].reward
        for output in rewards:
            with torch.no_grad():
                own = trainer.model(torch.tensor([output.prompt_token_ids])).logits[0, 0]
            assert output.reward == pytest.approx(float(own), abs=1e-4)
    with Rollout(str(start), **ENGINE, task="reward") as engine:
        before = [engine.classify(PAIR[side])[0].reward for side in PAIR]
        receipt = engine.update_weights(trainer.model)
        after = [engine.classify(PAIR[side])[0] for side in PAIR]
        assert [one.reward for one in after] == [one.reward for one in rewards] != before
        assert {one.weight_version for one in after} == {receipt.version}
