"""Nouns of generation that cross a process: what is asked for, and what comes back."""

from rollout.generation.chat_options import ChatOptions
from rollout.generation.classification import ClassificationOutput, classify_params
from rollout.generation.embedding import EmbeddingOutput, embed_params
from rollout.generation.labels import Labels
from rollout.generation.outputs import (
    CUT_SHORT,
    MAX_STALENESS,
    NAN_LOGITS,
    Completion,
    Logprobs,
    RequestOutput,
    VersionSpan,
)
from rollout.generation.packed_scores import PackedScores
from rollout.generation.request import (
    AnyPrompt,
    ContinuedPrompt,
    PromptInput,
    Request,
    parts_of,
)
from rollout.generation.sampling_mask import SamplingMask
from rollout.generation.sampling_params import GREEDY_BELOW, TOKEN_PARAMS, TOP_MODES, SamplingParams
from rollout.generation.scores import ScoreOutput, score_params, scored_rows
from rollout.generation.visuals import (
    PatchedVisual,
    PlacedVisual,
    Video,
    VideoFile,
    VisualPrompt,
    Visuals,
)

__all__ = [
    "CUT_SHORT",
    "GREEDY_BELOW",
    "MAX_STALENESS",
    "NAN_LOGITS",
    "TOKEN_PARAMS",
    "TOP_MODES",
    "AnyPrompt",
    "ChatOptions",
    "ClassificationOutput",
    "Completion",
    "ContinuedPrompt",
    "EmbeddingOutput",
    "Labels",
    "Logprobs",
    "PackedScores",
    "PatchedVisual",
    "PlacedVisual",
    "PromptInput",
    "Request",
    "RequestOutput",
    "SamplingMask",
    "SamplingParams",
    "ScoreOutput",
    "VersionSpan",
    "Video",
    "VideoFile",
    "VisualPrompt",
    "Visuals",
    "classify_params",
    "embed_params",
    "parts_of",
    "score_params",
    "scored_rows",
]
