"""Tool calls and thoughts as the model families write them, whole and piece by piece."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from rollout.server.http.openai.assistant import Message, MessageReader, delta, whole_message
from rollout.server.http.openai.chat_body import ChatBody
from rollout.server.http.openai.messages import template_messages
from rollout.server.http.parsers import REASONING_PARSERS, TOOL_PARSERS
from rollout.server.http.sessions import as_written

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
    ("hermes", f'<tool_call>[{{"name": "get_weather", "arguments": {_ROME}}}]', "", [ROME]),
    (
        "nemotron_json",
        f'I look.<TOOLCALL>[{{"name": "get_weather", "arguments": {_PARIS}}}, '
        f'{{"name": "get_weather", "arguments": {_ROME}}}]</TOOLCALL>',
        "I look.",
        [PARIS, ROME],
    ),
    (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_PARIS}}}]',
        "",
        [PARIS],
    ),
    (
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{_PARIS}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{_ROME}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        [PARIS, ROME],
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_PARIS}"
        f"<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_ROME}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [PARIS, ROME],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>no<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>no<｜tool▁calls▁end｜>",
        [],
    ),
    (
        "deepseek_v32",
        'Well.\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Well.\n",
        [ROME],
    ),
    (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{_PARIS}<|tool_call_end|><|tool_call_begin|>"
        f"functions.get_weather:1<|tool_call_argument_begin|>{_ROME}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "I look.",
        [PARIS, ROME],
    ),
    (
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>now\n"
        "</tool_call>",
        "I look.\n",
        [ROME, ("now", {})],
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
        "<arg_key>days</arg_key><arg_value>1</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        [ROME, ("now", {})],
    ),
    ("glm45", "<tool_call>a <b></tool_call> so", "<tool_call>a <b></tool_call> so", []),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">1</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        [ROME, ("now", {})],
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='Rome', days=1)]<|python_end|>",
        "",
        [ROME],
    ),
    ("llama4_pythonic", "[get_weather(city='Rome', days=1)]", "", [ROME]),
    ("llama4_pythonic", "<|python_start|>1 + 1", "<|python_start|>1 + 1", []),
    (
        "olmo3",
        "I look.\n<function_calls>\nget_weather(city='Rome', days=1)\nf(a=[true, None])\n"
        "</function_calls>",
        "I look.\n",
        [ROME, ("f", {"a": [True, None]})],
    ),
    ("olmo3", "<function_calls>no</function_calls>", "<function_calls>no</function_calls>", []),
    (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{_PARIS}<|call|>",
        "I look.",
        [PARIS],
    ),
    (
        "openai",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{_ROME}",
        "",
        [ROME],
    ),
    ("openai", "total: 1 < 2 <|x", "total: 1 < 2 <|x", []),
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


_F = '{"name": "f", "arguments": {}}'
F = ("f", {})

# As in WRITTEN: what a model got wrong, and goes on behind.
WRONG = [
    ("hermes", f"<tool_call>{_F[:-1]}</tool_call><tool_call>{_F}</tool_call> so", "so", [F, F]),
    ("nemotron_json", f"<TOOLCALL>[{_F}, 3]</TOOLCALL> so", "3]</TOOLCALL> so", [F]),
    ("mistral", f"[TOOL_CALLS][{_F}] so", "so", [F]),
    ("mistral", f"[TOOL_CALLS][{_F}] and {{x}}", "and {x}", [F]),
    ("mistral", "a[TOOL_CALLS]f{} [TOOL_CALLS]so", "a[TOOL_CALLS]so", [F]),
    ("granite", f"<|tool_call|>[{_F}]\n\nso", "so", [F]),
    ("llama3_json", f"{_F[:-1]} so", "so", [F]),
    ("llama3_json", '{"a" so', '{"a" so', []),
    ("llama4_pythonic", "<|python_start|>[f()]<|python_end|> so", "so", [F]),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>g<｜tool▁calls▁end｜> so",
        "<｜tool▁call▁begin｜>g<｜tool▁calls▁end｜> so",
        [F],
    ),
]
_WRONG_TAGS = [
    (
        "qwen3_coder",
        "<tool_call><function=f>oops</function></tool_call>",
        "oops</function></tool_call>",
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>oops</tool_call>",
        "oops</tool_call>",
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f">oops</invoke></minimax:tool_call>',
        "oops</invoke></minimax:tool_call>",
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WRONG)
def test_nothing_behind_a_call_that_is_wrong_is_lost(
    name: str, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    test_calls_are_read_whole_and_a_stream_of_characters_adds_up_to_them(name, text, content, calls)


@pytest.mark.parametrize(("name", "text", "content"), _WRONG_TAGS)
def test_nothing_behind_a_tag_that_is_wrong_is_lost(name: str, text: str, content: str) -> None:
    reader = MessageReader(calls=TOOL_PARSERS[name].parse, tools=TOOLS)
    whole = reader.read(text + text + " so", "", True)
    assert whole.content == content + content + " so"
    assert [call.name for call in whole.calls] == ["f", "f"]
    assert _streamed(reader, text + text + " so", "") == whole


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


_GPT_OSS = [
    (
        "openai_gptoss",
        "",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "hm",
        "Yes.",
    ),
    ("openai_gptoss", "", "<|channel|>analysis<|message|>never ends", "never ends", ""),
    ("openai_gptoss", "", "<|channel|>final<|message|>Yes.<|return|>", "", "Yes."),
    ("openai_gptoss", "<|channel|>final<|message|>", "Yes.", "", "Yes."),
    ("openai_gptoss", "<|channel|>analysis<|message|>", "hm<|end|>", "hm", ""),
    ("openai_gptoss", "", "Yes, to me <|x|>.", "", "Yes, to me <|x|>."),
    ("openai_gptoss", "", "<|channel|>fin", "", "<|channel|>fin"),
    ("openai_gptoss", "", "<|start|>assistant<|end|>", "", "<|start|>assistant<|end|>"),
]


@pytest.mark.parametrize(("name", "prompt", "text", "thought", "answer"), [*THOUGHTS, *_GPT_OSS])
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


@pytest.mark.parametrize(("name", "prompt", "text", "thought", "answer"), _GPT_OSS)
def test_the_tokens_of_a_channel_of_thought_are_counted_with_its_marks(
    name: str, prompt: str, text: str, thought: str, answer: str
) -> None:
    count = REASONING_PARSERS[name].count(
        [ord(c) for c in text], prompt, lambda ids: "".join(map(chr, ids))
    )
    assert text[:count].endswith(("<|end|>", thought)) if thought else count == 0
    assert text[count:].count("analysis") == 0


def test_calls_and_thoughts_of_gpt_oss_are_told_apart() -> None:
    reader = MessageReader(
        reasoning=REASONING_PARSERS["openai_gptoss"],
        calls=TOOL_PARSERS["openai"].parse,
        tools=TOOLS,
    )
    text = (
        "<|channel|>analysis<|message|>a <b> to=functions.x<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>and then<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json"
        f"<|message|>{_PARIS}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather"
        f"<|message|>{_ROME}<|call|>"
    )
    whole = reader.read(text, "", True)
    assert (whole.reasoning, whole.content) == ("a <b> to=functions.x\nand then", "I look.")
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [PARIS, ROME]
    assert _streamed(reader, text, "") == whole


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), [case for case in WRITTEN if case[-1]]
)
def test_calls_are_read_where_their_marks_are_special_tokens(
    name: str, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    body = ChatBody(
        model="m",
        messages=[{"role": "user", "content": "?"}],
        tools=[{"function": {"name": key, "parameters": TOOLS[key]}} for key in TOOLS],
    )
    reader = body.reader(TOOL_PARSERS[name], None)
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    marks = re.findall(r"<[^<>]*>|\[[A-Z_]+\]", text)
    tokenizer.add_special_tokens(sorted(set(marks)))
    tokenizer.add_tokens(sorted(set(text)))
    tokenizer.decoder = Fuse()
    skip = body.sampling(keep_special=reader.special).skip_special_tokens
    written = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=skip)
    read = reader.read(written, "", True)
    assert [(call.name, json.loads(call.arguments)) for call in read.calls] == calls
    assert read.content == content


def test_the_ids_that_a_model_writes_are_those_of_its_calls() -> None:
    reader = MessageReader(calls=TOOL_PARSERS["kimi_k2"].parse, tools=TOOLS)
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3"
        f"<|tool_call_argument_begin|>{_ROME}<|tool_call_end|><|tool_calls_section_end|>"
    )
    (call,) = whole_message(reader.read(text, "", True), "an-id")["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("functions.get_weather:3", "get_weather")
    (streamed,) = delta(Message(), reader.read(text, "", True), "an-id")["tool_calls"]
    assert streamed["id"] == call["id"]


@pytest.mark.parametrize(
    ("schema", "value", "read"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "12", 12),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "12", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Point"}]}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Loop"}, "12", "12"),
        ({"$ref": "#/$defs/Nowhere"}, "12", "12"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"type": 5}, "1", "1"),
        ({"type": [{}]}, "1", "1"),
    ],
)
def test_an_argument_that_is_written_plainly_is_of_its_declared_type(
    schema: dict[str, object], value: str, read: object
) -> None:
    text = f'<minimax:tool_call><invoke name="f"><parameter name="a">{value}</parameter></invoke>'
    defined = {"Point": {"type": "object"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}}
    tools = {"f": {"properties": {"a": schema}, "$defs": defined}}
    _, (call,) = TOOL_PARSERS["minimax_m2"].parse(text, True, tools)
    assert json.loads(call.arguments) == {"a": read}


def test_a_thought_may_come_before_a_call() -> None:
    reader = MessageReader(
        reasoning=REASONING_PARSERS["qwen3"], calls=TOOL_PARSERS["hermes"].parse, tools=TOOLS
    )
    text = f'<think>a <tool_call></think>\n<tool_call>{{"name": "f", "arguments": {_ROME}}}'
    whole = reader.read(text, "", True)
    assert (whole.reasoning, whole.content) == ("a <tool_call>", "")
    assert [call.name for call in whole.calls] == ["f"]
    assert _streamed(reader, text, "") == whole


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "hermes",
            '<tool_call>{"name": "a</tool_call>b", "arguments": {}}',
            '<tool_call>{"name": "a</tool_call>b", "arguments": {}}',
            [],
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁calls▁end｜>g<｜tool▁sep｜>{}",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁calls▁end｜>g<｜tool▁sep｜>{}",
            [],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": [1', "", ["{}"]),
        ("llama3_json", '{"name": "f", "parameters": {}, "arguments": [1', "", ["{}"]),
        ("llama3_json", '{"name": "f", "parameters": {}, "name": "g"}', "", ["{}"]),
    ],
)
def test_what_a_stream_has_sent_stays_whatever_comes_behind_it(
    name: str, text: str, content: str, calls: list[str]
) -> None:
    reader = MessageReader(calls=TOOL_PARSERS[name].parse, tools=TOOLS)
    whole = reader.read(text, "", True)
    assert whole.content == content
    assert [(call.name, call.arguments) for call in whole.calls] == [("f", c) for c in calls]
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
                calls.append([function["name"], "", new.calls[len(calls)].id])
            calls[call["index"]][1] += function["arguments"]
        old = new
    made = tuple(type(old.calls[0])(*call) for call in calls) if calls else ()
    return Message(content, None if reader.reasoning is None else reasoning, made)


def test_a_thought_that_comes_back_is_there_by_the_names_that_templates_read() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    thought = {"role": "assistant", "reasoning": "hm"}
    (bare,) = template_messages([{**thought, "content": None, "tool_calls": [call]}])
    assert bare["reasoning_content"] == bare["thinking"] == "hm"
    # The template of gpt-oss refuses such a message with both.
    (both,) = template_messages([{**thought, "content": "So.", "tool_calls": [call]}])
    assert both["reasoning_content"] == "hm"
    assert "thinking" not in both


def test_an_answer_that_comes_back_as_it_was_shown_is_the_one_that_was_written() -> None:
    reader = MessageReader(
        reasoning=REASONING_PARSERS["qwen3"], calls=TOOL_PARSERS["hermes"].parse, tools=TOOLS
    )
    text = f'hm</think>\n\nSo.<tool_call>{{"name": "f", "arguments": {_ROME}}}</tool_call>'
    held = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    shown = whole_message(reader.read(text, "<think>", True), "an-id")
    sent = template_messages([held[0], {**shown, "reasoning": None, "reasoning_content": None}])
    assert as_written(sent, held, reader, reader.calls) == held
    edited = [sent[0], {**sent[1], "content": "Other."}]
    assert as_written(edited, held, reader, reader.calls) == edited


@pytest.mark.parametrize("then", ["auto", "required", "none", "get_weather"])
@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("auto", f'<tool_call>{{"name": "get_weather", "arguments": {_ROME}}}</tool_call>'),
        ("required", f'[{{"name": "get_weather", "parameters": {_ROME}}}]'),
        ("get_weather", _ROME),
        ("none", "<tool_call>no"),
    ],
)
def test_an_answer_comes_back_to_its_session_also_with_another_tool_choice(
    choice: str, text: str, then: str
) -> None:
    parser = TOOL_PARSERS["hermes"]
    shown = whole_message(_of_choice(choice).read(text, "", True), "an-id")
    held = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    sent = template_messages([held[0], shown])
    assert as_written(sent, held, _of_choice(then), parser.parse) == held


def test_an_answer_whose_call_was_cut_short_may_be_edited() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Ro'
    held = [{"role": "assistant", "content": text}]
    edited = [{"role": "assistant", "content": "Rome?"}]
    assert as_written(edited, held, _of_choice("auto"), TOOL_PARSERS["hermes"].parse) == edited


def _of_choice(choice: str) -> MessageReader:
    named = choice in TOOLS
    body = ChatBody(
        model="m",
        messages=[{"role": "user", "content": "?"}],
        tools=[{"function": {"name": key, "parameters": TOOLS[key]}} for key in TOOLS],
        tool_choice={"type": "function", "function": {"name": choice}} if named else choice,
    )
    return body.reader(TOOL_PARSERS["hermes"], None)
