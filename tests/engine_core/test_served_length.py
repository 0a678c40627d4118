"""How long a sequence may be, by the config, by what was asked for, and by what fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.config import EngineConfig
from rollout.engine.core import EngineCore
from rollout.errors import ConfigError

LONG = 1 << 22  # positions; a table of them would take a gigabyte on the way
SETTINGS = {"device": "cpu", "num_threads": 1, "skip_tokenizer_init": True, "block_size": 16}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long")
    write_tiny(path, max_position_embeddings=LONG)
    return path


def test_rope_tables_are_as_long_as_what_is_served(long: Path) -> None:
    with Rollout(str(long), executor="inline", num_kv_blocks=8, **SETTINGS) as engine:
        core = engine._async.backend.core
        assert core.max_model_len == 8 * 16
        runner = core._executor._worker.runner
        params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        assert len(engine.generate([1] * 20, params)[0].outputs[0].token_ids) == 100
        [rotary] = runner.instances.live.rotaries
        assert len(rotary.table) == core.max_model_len


def test_more_than_the_models_own_maximum_is_refused_before_any_rank_starts(long: Path) -> None:
    core = EngineCore(EngineConfig(model=str(long), max_model_len=LONG + 1, **SETTINGS))
    with pytest.raises(ConfigError, match=r"maximum of 4194304 tokens; .*max_position_embeddings"):
        core.start()
    assert core._executor is None
