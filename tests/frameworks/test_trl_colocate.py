"""TRL's stock ``GRPOTrainer(vllm_mode="colocate")`` over ``rollout.integrations.trl_colocate``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from frameworks.jobs import run
from tiny_models import write_tiny

from rollout.errors import ConfigError, InvalidRequest, WeightMismatch
from rollout.integrations.trl_colocate import LLM

ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32, "dtype": "float32"}


def test_weights_that_are_pushed_are_one_update_and_a_failed_one_changes_nothing(
    tmp_path: Path,
) -> None:
    write_tiny(tmp_path / "a")
    weights = dict(write_tiny(tmp_path / "b", seed=1).state_dict())
    said = {"gpu_memory_utilization": 0.3, "distributed_executor_backend": "external_launcher"}
    llm = LLM(model=str(tmp_path / "a"), max_model_len=128, engine_config=ENGINE, **said)
    try:
        load = llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights
        assert llm.llm_engine.model_config.max_model_len == 128
        held = torch.empty(0)
        for name, tensor in weights.items():
            held = tensor.detach().clone()
            load([(name, held)])
            held.zero_()  # whoever gathered it may free it now
        with pytest.raises(InvalidRequest, match="an update is under way"):
            llm.generate([{"prompt_token_ids": [5, 6]}])
        assert llm.reset_prefix_cache()
        assert llm.rollout.check_weights(weights).equal
        for name, tensor in [*weights.items(), ("model.nonsense", held)]:
            load([(name, tensor * 2)])
        with pytest.raises(WeightMismatch, match="nonsense"):
            llm.reset_prefix_cache()
        assert llm.rollout.check_weights(weights).equal
        assert [receipt.version for receipt in llm.receipts] == [1]
        asked = SimpleNamespace
        with pytest.raises(InvalidRequest, match="multi_modal_data"):
            llm.generate([{"prompt_token_ids": [5], "multi_modal_data": asked()}])
    finally:
        llm.rollout.shutdown()
    with pytest.raises(ConfigError, match="bitsandbytes"):
        LLM(model=str(tmp_path / "a"), quantization="bitsandbytes")


@pytest.mark.more
@pytest.mark.parametrize(
    ("size", "sleep", "kind"), [(1, "awake", "glm4_moe"), (2, "sleep", "qwen3")]
)
def test_three_steps_of_the_stock_trainer(tmp_path: Path, size: int, sleep: str, kind: str) -> None:
    """With two ranks the trainer's own processes are the engine's; asleep while it trains. The
    mixture's routers have buffers, over which TRL does not go.
    """
    write_tiny(tmp_path / "tiny", kind, tokenizer=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    job = ("trl_colocate_job.py", tmp_path / "tiny", tmp_path / "out", sleep)
    ranks = run(*job, launcher=launcher if size > 1 else ())
    assert len(ranks) == size
    for found in ranks:
        assert [sync["equal"] for sync in found["syncs"]] == [True] * len(found["syncs"])
        assert len({sync["norm"] for sync in found["syncs"]}) >= 3  # every step changed the weights
        assert len(found["differences"]) == 3 * 4 * size
        # Sampled with the logprobs that transformers computes of the same weights.
        assert max(found["differences"]) < 1e-4
        assert len(found["rows"]) == (3 if found is ranks[0] or size == 1 else len(found["rows"]))
        assert "hold NaN or infinity" in found["failed"]
        assert found["kept"]
