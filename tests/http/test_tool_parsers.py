"""Tool calls and thoughts as the model families write them, whole and piece by piece."""

from __future__ import annotations

import json

import pytest

from rollout.server.http.assistant import Message, MessageReader, delta, whole_message
from rollout.server.http.messages import template_messages
from rollout.server.http.reasoning import REASONING_PARSERS
from rollout.server.http.sessions import as_written
from rollout.server.http.tool_parsers import TOOL_PARSERS

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }
}
PARIS = ("get_weather", {"city": 'Paris "FR" {é}', "days": 2})
ROME = ("get_weather", {"city": "Rome", "days": 1})
_PARIS, _ROME = (json.dumps(call[1], ensure_ascii=False) for call in (PARIS, ROME))

# (parser, what the model wrote, text beside the calls, calls)
WRITTEN = [
    (
        "hermes",
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {_PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_ROME}}}\n</tool_call>',
        "I look.\n",
        [PARIS, ROME],
    ),
    ("hermes", f'<tool_call>{{"arguments": {_ROME}, "name": "get_weather"}}', "", [ROME]),
    ("hermes", "2 < 3 and <tool", "2 < 3 and <tool", []),
    (
        "hermes",
        "<tool_call>\nnonsense\n</tool_call> so",
        "<tool_call>\nnonsense\n</tool_call> so",
        [],
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(_ROME)}}}',
        "",
        [ROME],
    ),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {_PARIS}}}', "", [PARIS]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {_PARIS}}}; '
        f'{{"name": "get_weather", "parameters": {_ROME}}}',
        "",
        [PARIS, ROME],
    ),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", "It rains.", "It rains.", []),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_PARIS}}}, '
        f'{{"name": "get_weather", "arguments": {_ROME}}}]',
        "",
        [PARIS, ROME],
    ),
    (
        "mistral",
        f"Well.[TOOL_CALLS]get_weather[ARGS]{_PARIS}[TOOL_CALLS]get_weather{_ROME}",
        "Well.",
        [PARIS, ROME],
    ),
    ("pythonic", "[get_weather(city='Rome', days=1)]", "", [ROME]),
    ("pythonic", "[1, 2] it is", "[1, 2] it is", []),
    ("pythonic", "[f(a={1})]", "[f(a={1})]", []),
    ("pythonic", "[f(a=b'x')]", "[f(a=b'x')]", []),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
    (
        "qwen3_coder",
        "Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n1\n</parameter>\n</function>\n</tool_call>",
        "Let me see.\n",
        [ROME],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WRITTEN)
def test_calls_are_read_whole_and_a_stream_of_characters_adds_up_to_them(
    name: str, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    reader = MessageReader(calls=TOOL_PARSERS[name].parse, tools=TOOLS)
    whole = reader.read(text, "", True)
    assert whole.content == content
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls
    assert _streamed(reader, text, "") == whole


THOUGHTS = [
    ("qwen3", "", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
    ("qwen3", "assistant\n<think>\n", "hm\n</think>\n\nYes.", "hm", "Yes."),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("qwen3", "", "Yes.", "", "Yes."),
    ("qwen3", "", "<think>\nnever ends", "never ends", ""),
    ("qwen3", "", "\n<think>hm", "hm", ""),
    ("qwen3", "", "\n</x", "", "\n</x"),
    ("qwen3", "", " \n", "", " \n"),
    ("deepseek_r1", "", "hm\n</think>\n\nYes.", "hm", "Yes."),
    ("deepseek_r1", "", "<think>hm</think>Yes.", "hm", "Yes."),
    ("mistral", "", "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
]


@pytest.mark.parametrize(("name", "prompt", "text", "thought", "answer"), THOUGHTS)
def test_thoughts_are_told_from_answers_whole_and_character_by_character(
    name: str, prompt: str, text: str, thought: str, answer: str
) -> None:
    reader = MessageReader(reasoning=REASONING_PARSERS[name])
    assert reader.read(text, prompt, True) == Message(answer, thought)
    assert _streamed(reader, text, prompt) == Message(answer, thought)


@pytest.mark.parametrize(("name", "prompt", "text", "thought", "answer"), THOUGHTS)
def test_the_tokens_of_a_thought_are_counted_with_its_marks(
    name: str, prompt: str, text: str, thought: str, answer: str
) -> None:
    parser = REASONING_PARSERS[name]
    count = parser.count([ord(c) for c in text], prompt, lambda ids: "".join(map(chr, ids)))
    rest = text[count:]
    assert parser.end not in rest
    assert rest.strip() == answer.strip()
    assert count == 0 or thought or parser.end in text[:count]


def test_a_thought_may_come_before_a_call() -> None:
    reader = MessageReader(
        reasoning=REASONING_PARSERS["qwen3"], calls=TOOL_PARSERS["hermes"].parse, tools=TOOLS
    )
    text = f'<think>a <tool_call></think>\n<tool_call>{{"name": "f", "arguments": {_ROME}}}'
    whole = reader.read(text, "", True)
    assert (whole.reasoning, whole.content) == ("a <tool_call>", "")
    assert [call.name for call in whole.calls] == ["f"]
    assert _streamed(reader, text, "") == whole


def _streamed(reader: MessageReader, text: str, prompt: str) -> Message:
    """The sum of the deltas when every character comes alone."""
    old, content, reasoning, calls = Message(), "", "", []
    for end in range(1, len(text) + 2):
        new = reader.read(text[:end], prompt, end > len(text))
        added = delta(old, new, "x")
        content += added.get("content", "")
        reasoning += added.get("reasoning", "")
        for call in added.get("tool_calls", ()):
            function = call["function"]
            if call["index"] == len(calls):
                calls.append([function["name"], ""])
            calls[call["index"]][1] += function["arguments"]
        old = new
    made = tuple(type(old.calls[0])(*call) for call in calls) if calls else ()
    return Message(content, None if reader.reasoning is None else reasoning, made)


def test_an_answer_that_comes_back_as_it_was_shown_is_the_one_that_was_written() -> None:
    reader = MessageReader(
        reasoning=REASONING_PARSERS["qwen3"], calls=TOOL_PARSERS["hermes"].parse, tools=TOOLS
    )
    text = f'hm</think>\n\nSo.<tool_call>{{"name": "f", "arguments": {_ROME}}}</tool_call>'
    held = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    shown = whole_message(reader.read(text, "<think>", True), "an-id")
    sent = template_messages([held[0], {**shown, "reasoning": None, "reasoning_content": None}])
    assert as_written(sent, held, reader) == held
    edited = [sent[0], {**sent[1], "content": "Other."}]
    assert as_written(edited, held, reader) == edited
