"""How a server answers where a request does not say."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollout.config import check_known
from rollout.generation import SamplingParams
from rollout.server.http.parsers import REASONING_PARSERS, TOOL_PARSERS, ReasoningParser, ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDefaults:
    """``logprobs_mode``: which logprobs fill OpenAI's field. ``tool_call_parser`` and
    ``reasoning_parser``: how chats are read, by their names in ``TOOL_PARSERS`` and
    ``REASONING_PARSERS``; None: they are not. Raises ``ConfigError`` for another name.
    ``routed_experts``, ``sampling_mask``: every answer has them, as by vLLM's flags.
    ``response_role``: of a chat's messages.
    """

    logprobs_mode: str = "raw_logprobs"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    routed_experts: bool = False
    sampling_mask: bool = False
    response_role: str = "assistant"

    def __post_init__(self) -> None:
        for name, known in (("tool_call", TOOL_PARSERS), ("reasoning", REASONING_PARSERS)):
            if (given := getattr(self, f"{name}_parser")) is not None:
                check_known(given, list(known), f"{name}_parser")

    def asked(self, params: SamplingParams) -> SamplingParams:
        """``params`` of a request that may leave to the server what comes beside its tokens."""
        if not (self.routed_experts or self.sampling_mask):
            return params
        return replace(
            params,
            return_routed_experts=params.return_routed_experts or self.routed_experts,
            return_sampling_mask=params.return_sampling_mask or self.sampling_mask,
        )

    @property
    def tools(self) -> ToolParser | None:
        return None if self.tool_call_parser is None else TOOL_PARSERS[self.tool_call_parser]

    @property
    def reasoning(self) -> ReasoningParser | None:
        return None if self.reasoning_parser is None else REASONING_PARSERS[self.reasoning_parser]
