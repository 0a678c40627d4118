"""A fleet of quantised engines: each quantises what it is sent, and who joins is sent codes."""

import time
from pathlib import Path

import pytest
from adapted_models import adapted
from fleet_front import ENGINE, Front

from rollout import Rollout, SamplingParams
from rollout.engine.updates.live_form import send_live_form
from rollout.engine.updates.read_lease import ReadLease
from rollout.errors import ChecksumMismatch

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5, 6, 7, n] for n in range(8)]


def said(rollout, adapter=None):
    outputs = rollout.generate(PROMPTS, SamplingParams(adapter=adapter, **GREEDY))
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs.raw) for o in outputs]


def eventually(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def codes(engine):
    """The digest of all codes and scales, as the last update left them."""
    return engine.receipts()[-1].details["quantized_digest"]


def row(front, name):
    return next(found for found in front.fleet.members() if found["name"] == name)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize(
    ("scheme", "ranks"),
    [
        ("int8", 1),
        pytest.param("fp8", 1, marks=pytest.mark.more),
        pytest.param("mxfp4", 1, marks=pytest.mark.more),
        pytest.param("int8", 2, marks=pytest.mark.more),
    ],
)
def test_a_quantised_member_that_joins_gets_the_codes_of_another(
    checkpoint, trained, tmp_path, scheme, ranks
):
    settings = {**ENGINE, "quantization": scheme, "max_adapters": 2, "max_lora_rank": 4}
    settings |= {"tensor_parallel_size": ranks}
    engines = [Rollout(checkpoint, **settings) for _ in range(2 if ranks == 1 else 1)]
    front = Front(tmp_path / "record", engines)
    late = Rollout(checkpoint, **settings)
    try:
        front.fleet.wait_serving(len(engines), 20.0)
        before = said(engines[0])
        front.rollout.update_weights(trained, adapters={"math": adapted(Path(checkpoint), 1)})
        live = said(engines[0]), said(engines[0], "math")
        assert live[0] != before
        name = front.fleet.add(late.address)
        front.fleet.wait_serving(len(engines) + 1, 20.0)
        eventually(lambda: late.metrics().state == "running")
        assert codes(late) == codes(engines[0])
        assert (said(late), said(late, "math")) == live
        assert late.check_weights(trained).equal
        receipt = front.rollout.rollback()
        assert receipt.details["members"][name] == "committed"  # it began with those weights
        assert said(late) == said(engines[0]) == before
        front.rollout.update_weights(trained)
        assert said(late) == said(engines[0]) == live[0]
        if (scheme, ranks) == ("int8", 1):
            plain = Rollout(checkpoint, **ENGINE)
            engines.append(plain)
            other = front.fleet.add(plain.address)
            eventually(lambda: "quantization is 'none'" in row(front, other)["why"])
            assert row(front, other)["status"] != "serving"
    finally:
        front.close()
        late.shutdown()
        for engine in engines:
            engine.shutdown()


def test_a_byte_that_changes_on_its_way_is_refused(checkpoint, trained):
    class Torn:
        """A channel that turns one bit of one byte, of codes, scales, norms or digests."""

        def __init__(self, channel, at):
            self.channel, self.at = channel, at

        def __getattr__(self, name):
            return getattr(self.channel, name)

        def bucket(self, header, payload):
            entry = header.entries[int(self.at * len(header.entries))]
            payload[entry.offset] ^= 1
            self.channel.bucket(header, payload)

    settings = {**ENGINE, "quantization": "int8"}
    with Rollout(checkpoint, **settings) as one, Rollout(checkpoint, **settings) as other:
        one.update_weights(trained)
        donor, before = one._async.backend.coordinator, said(other)
        how = {"version": 1, "adapters_after": None, "timeout": 30.0}
        for at in (0.0, 0.2, 0.4, 0.6, 0.8):
            with pytest.raises(ChecksumMismatch):
                send_live_form(donor, ReadLease(), Torn(other._async.backend.open(), at), {}, **how)
        assert (other.weight_version, said(other)) == (0, before)
        send_live_form(donor, ReadLease(), other._async.backend.open(), {}, **how)
        assert (other.weight_version, said(other)) == (1, said(one))


def test_engines_of_other_bits_are_no_fleet(checkpoint, tmp_path):
    others = {"quantization": "int8", "kv_cache_dtype": "int8", "deterministic": True}
    settings = [{}, *({name: value} for name, value in others.items())]
    engines = [Rollout(checkpoint, **ENGINE, **each) for each in settings]
    told = {"kv_cache_dtype": "int8_per_token_head"}
    front = Front(tmp_path / "record", engines[:1])
    try:
        front.fleet.wait_serving(1, 20.0)
        for engine, (flag, value) in zip(engines[1:], others.items(), strict=True):
            name, why = front.fleet.add(engine.address), f"{flag} is '{told.get(flag, value)}'"
            eventually(lambda name=name, why=why: why in row(front, name)["why"])
            assert row(front, name)["status"] != "serving"
    finally:
        front.close()
        for engine in engines:
            engine.shutdown()
