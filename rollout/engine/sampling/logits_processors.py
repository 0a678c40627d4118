"""Edits of single logits: biases, forbidden stops and repetition penalties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollout.engine.sampling.metadata import (
    FREQUENCY,
    PRESENCE,
    REPETITION,
    SamplingMetadata,
)


def apply_edits(values: Tensor, sampling: SamplingMetadata) -> None:
    """Add ``edit_values`` to their logits, in place on [S, vocabulary] float32.

    Tokens outside the vocabulary (a tokenizer's unused stop ids) are passed over.
    """
    if not len(sampling.edit_rows):
        return
    vocab, device = values.shape[1], values.device
    inside = (sampling.edit_ids >= 0) & (sampling.edit_ids < vocab)
    index = torch.from_numpy((sampling.edit_rows * vocab + sampling.edit_ids)[inside]).to(device)
    values.view(-1).index_add_(0, index, torch.from_numpy(sampling.edit_values[inside]).to(device))


def apply_penalties(values: Tensor, sampling: SamplingMetadata) -> None:
    """Penalise tokens already in the sequence, in place on [S, vocabulary] float32.

    Repetition, over prompt and output: a positive logit is divided by it, another multiplied
    (Keskar 2019). Then, over the output only: minus frequency times the count, minus presence.
    """
    if not len(sampling.history_rows):
        return
    vocab = values.shape[1]
    lengths = np.diff(sampling.history_starts)
    entry = np.repeat(np.arange(len(lengths)), lengths)
    row = sampling.history_rows[entry]
    place = np.arange(len(sampling.history)) - sampling.history_starts[entry]
    is_output = place >= sampling.history_prompts[entry]
    flat = row * vocab + sampling.history
    unique, inverse = np.unique(flat, return_inverse=True)
    counts = np.bincount(inverse[is_output], minlength=len(unique)).astype(np.float32)
    numbers = sampling.numbers[unique // vocab]
    minus = numbers[:, FREQUENCY] * counts + numbers[:, PRESENCE] * (counts > 0)

    device = values.device
    index = torch.from_numpy(unique).to(device)
    repetition = torch.from_numpy(numbers[:, REPETITION].copy()).to(device)
    score = values.view(-1)[index]
    score = torch.where(score < 0, score * repetition, score / repetition)
    values.view(-1)[index] = score - torch.from_numpy(minus).to(device)
