"""Builds sampling batches from parameters alone, for the tests of this folder."""

from __future__ import annotations

from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sequences.sequence import ScheduledBatch, ScheduledEntry, Sequence
from rollout.engine.steps.batch import decode_batch, encode_batch
from rollout.generation import SamplingParams


def sequence(
    params: SamplingParams,
    *,
    prompt=(1, 2, 3),
    output=(),
    seed=0,
    seq_id=0,
    stop_ids=(),
    computed=None,
    blocks=None,
    block_size=4,
) -> Sequence:
    """A running sequence, by default with all but its last token computed."""
    s = Sequence(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        index=0,
        params=params,
        seed=seed,
        prompt_token_ids=list(prompt),
        stop_ids=frozenset(stop_ids),
    )
    s.token_ids += list(output)
    s.num_computed = s.num_tokens - 1 if computed is None else computed
    needed = -(-s.num_tokens // block_size)
    s.block_table = list(range(needed)) if blocks is None else list(blocks)
    return s


def decode_entries(sequences) -> ScheduledBatch:
    return ScheduledBatch([ScheduledEntry(s, s.num_tokens - s.num_computed) for s in sequences], 7)


def sampling_batch(sequences, block_size=4) -> SamplingMetadata:
    return decode_batch(*encode_batch(decode_entries(sequences), block_size))[1]


def repeated(params: SamplingParams, seeds, **kwargs) -> SamplingMetadata:
    return sampling_batch([sequence(params, seed=seed, **kwargs) for seed in seeds])
