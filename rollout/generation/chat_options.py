"""How a conversation becomes a prompt: the noun that crosses a process beside its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rollout.errors import InvalidRequest
from rollout.wire.spellings import VERBS

MAX_TOOLS = 1024
# What the template's caller sets itself; anything else may be a variable of the template.
_TAKEN = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "tokenize", "return_dict"),
        *("add_generation_prompt", "continue_final_message", "return_tensors", "padding"),
        *("return_assistant_tokens_mask", "truncation", "max_length", "tokenizer_kwargs"),
        "sanitize_control_tokens",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What the chat template is given beside the messages; names are vLLM's.

    ``tools``: functions in OpenAI's form, at most 1024. ``chat_template_kwargs``: variables of the
    template, such as Qwen3's ``enable_thinking``. ``add_generation_prompt``: end with the beginning
    of the assistant's turn (None: unless the final message is continued).
    ``continue_final_message``: leave the last message open, so that the answer goes on with it.
    Raises ``InvalidRequest``.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tools, str) or not isinstance(self.tools, Sequence):
            raise InvalidRequest("tools must be a list of functions")
        if len(self.tools) > MAX_TOOLS:
            raise InvalidRequest(f"{len(self.tools)} tools are too many: {MAX_TOOLS} at most")
        if not all(isinstance(tool, Mapping) for tool in self.tools):
            raise InvalidRequest("tools must be objects: functions in OpenAI's form")
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise InvalidRequest("chat_template_kwargs must map the template's variables to values")
        if taken := sorted(_TAKEN.intersection(self.chat_template_kwargs)):
            raise InvalidRequest(f"a chat template takes no variable named {taken[0]}")
        for name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidRequest(
                    f"{name} must be true or false, got {getattr(self, name)!r:.80}"
                )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other: the answer "
                "begins a turn, or goes on with the last one"
            )

    @property
    def begins_turn(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @classmethod
    def of_variables(cls, variables: Mapping[str, Any]) -> ChatOptions:
        """Of all that a template may see, in one mapping: its own variables among the fields."""
        known = {f.name for f in fields(cls)}
        own = {name: value for name, value in variables.items() if name not in known}
        given = {name: value for name, value in variables.items() if name in known}
        more = given.pop("chat_template_kwargs", None)
        if not isinstance(more, Mapping | None):
            return cls(chat_template_kwargs=more)  # which says what it must be
        return cls.from_dict({**given, "chat_template_kwargs": own | dict(more or {})})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ChatOptions:
        """Of plain values, None for a default; an unknown key is refused with the nearest one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                hint = VERBS.hint(str(key), known)
                raise InvalidRequest(f"unknown option of a chat {key!r:.80}; {hint}")
        return cls(**{key: value for key, value in values.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """What is not at its default, in the form of ``from_dict``."""
        default = asdict(ChatOptions())
        return {name: value for name, value in asdict(self).items() if value != default[name]}
