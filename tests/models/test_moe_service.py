"""Mixtures of experts behind the public face: live update equals fresh start, bit for bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.errors import ConfigError, WeightMismatch
from rollout.kernels import digest
from rollout.server.preflight import check
from rollout.weight_sync.protocol.digests import total
from rollout.weights import Box

ENGINE = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 256,
    "skip_tokenizer_init": True,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
PLACES = ({}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "expert_parallel": True})


def samples(engine) -> list[tuple[list[int], list[float]]]:
    out = [o.outputs[0] for o in engine.generate(PROMPTS, GREEDY)]
    return [(list(c.token_ids), list(c.logprobs.raw)) for c in out]


@pytest.mark.parametrize(
    ("arch", "place"),
    [("qwen3_moe", PLACES[2]), ("mixtral", PLACES[0])],
)
def test_a_live_module_makes_the_engine_that_its_files_would(tmp_path, arch, place):
    """The trainer sends fused experts, the files hold them one by one (or fused): no difference."""
    old, new, fused = (tmp_path / name for name in ("old", "new", "fused"))
    write_tiny(old, arch)
    trained = write_tiny(new, arch, seed=1)
    write_tiny(fused, arch, seed=1, original_format=False)
    files = load_file(new / "model.safetensors")
    with (
        Rollout(str(old), **ENGINE, **place) as live,
        Rollout(str(fused), **ENGINE, **place) as cold,
    ):
        before = samples(live)
        assert live.preflight(trained).equal
        assert live.check_weights(trained).differing
        receipt = live.update_weights(trained, bucket_bytes=30_000, timeout=20)
        assert receipt.num_tensors == len(files)
        assert receipt.digest == total(
            digest(t, tuple(t.shape), Box.full(tuple(t.shape))) for t in files.values()
        )
        for source in (trained, str(new), str(fused)):
            assert live.check_weights(source).equal
            assert cold.check_weights(source).equal
        after = samples(live)
        assert after != before
        assert after == samples(cold)
        broken = dict(trained.state_dict())
        broken["model.layers.0.mlp.experts.down_proj"] = torch.zeros(6, 64, 25)
        with pytest.raises(WeightMismatch, match=r"experts\.down_proj: has shape"):
            live.update_weights(broken, timeout=10)
        del broken["model.layers.0.mlp.experts.down_proj"]
        with pytest.raises(WeightMismatch, match=r"experts\.0\.\w+\.weight is missing"):
            live.update_weights(broken, timeout=10)
        assert samples(live) == after


def test_the_check_before_a_start_knows_both_spellings(tmp_path):
    for original in (True, False):
        path = tmp_path / str(original)
        write_tiny(path, "mixtral", original_format=original)
        for place in PLACES:
            facts = check(_config(path, **place))
            assert facts.num_tensors == 2 * (3 * 6 + 7) + 3
    write_tiny(tmp_path / "dense")
    with pytest.raises(ConfigError, match="has no experts"):
        check(_config(tmp_path / "dense", tensor_parallel_size=2, expert_parallel=True))


def _config(path, **settings):
    from rollout import EngineConfig

    return EngineConfig(model=str(path), **ENGINE, **settings)
