"""Tokenizer, incremental text and stop strings."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_core.harness import PROMPT, Sink, Start, request, run
from engine_core.toy_model import continuation
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CHAT_TEMPLATE, make_tokenizer
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from rollout.engine.tokenizer import Detokenizer, Tokenizer
from rollout.errors import ConfigError, InvalidRequest
from rollout.generation import ChatOptions, RequestOutput, SamplingParams

TOKENIZER = Tokenizer(make_tokenizer(320))
SLOW = Tokenizer(make_tokenizer(320), slow=True)


def detokenize(ids: list[int], prompt: list[int], at_once: bool = False, **params: object) -> str:
    text = Detokenizer(TOKENIZER, prompt, SamplingParams.from_dict(params))
    if at_once:
        text.feed(ids, final=True)
    else:
        for token in ids:
            text.feed((token,))
        text.feed((), final=True)
    return text.text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.text(max_size=10))
def test_text_grows_token_by_token_into_what_was_encoded(text: str, prompt: str) -> None:
    ids, before = TOKENIZER.encode(text), TOKENIZER.encode(prompt)
    assert detokenize(ids, before) == detokenize(ids, before, at_once=True) == text


def test_an_incomplete_character_is_held_back_until_it_is_whole_or_the_end() -> None:
    ids = TOKENIZER.encode("a🙂")
    text = Detokenizer(TOKENIZER, [], SamplingParams())
    seen = []
    for token in ids:
        text.feed((token,))
        seen.append(text.text)
    assert seen == ["a"] * (len(ids) - 1) + ["a🙂"]
    cut = Detokenizer(TOKENIZER, [], SamplingParams())
    cut.feed(ids[:-1], final=True)
    assert cut.text.startswith("a")
    assert "\ufffd" in cut.text


class Bytes:
    """Every byte is a token, and a run of them is decoded as a whole, as Llama 2 and Gemma do."""

    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    def __init__(self) -> None:
        self.longest = 0  # tokens decoded at once

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(token_ids))
        return str(self.decoder.decode([f"<0x{token:02X}>" for token in token_ids]))


def test_a_context_begins_where_a_character_does() -> None:
    for prompt in ("bé😀", "a😀é", "😀😀😀"):
        text = Detokenizer(Bytes(), list(prompt.encode()), SamplingParams())
        for token in "好b".encode():
            text.feed((token,))
        assert text.text == "好b"


def test_what_was_shown_stays_when_a_sample_ends_inside_a_character() -> None:
    ids = list("😀你 é😀".encode())[:-2]
    for size in (1, 3, len(ids)):
        text = Detokenizer(Bytes(), [], SamplingParams())
        for at in range(0, len(ids), size):
            text.feed(ids[at : at + size])
        assert text.text == "😀你 é"
        text.make(ids)
        assert text.text.rstrip("\ufffd") == "😀你 é"
        assert text.text.endswith("\ufffd")


def test_tokens_that_make_no_character_are_shown_and_cost_no_more_the_more_there_are() -> None:
    tokenizer = Bytes()
    one_by_one, together = (Detokenizer(tokenizer, [], SamplingParams()) for _ in "ab")
    ids = [0x80] * 200
    for token in ids:
        one_by_one.feed((token,))
    assert tokenizer.longest < 32
    together.feed(ids)
    assert one_by_one.text == together.text
    assert len(one_by_one.text) > 100


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = [*TOKENIZER.encode("hi"), TOKENIZER.eos_token_id or 0, *TOKENIZER.encode("ho")]
    assert detokenize(ids, []) == "hiho"
    assert detokenize(ids, [], skip_special_tokens=False) == "hi<|im_end|>ho"


def test_the_stop_string_that_ends_first_cuts_the_text() -> None:
    params = SamplingParams(stop=("world", "lo w", "o wo"))
    text = Detokenizer(TOKENIZER, [], params)
    text.feed(TOKENIZER.encode("hello world"))
    assert text.cut_at_stop(0) == "lo w"
    assert text.text == "hel"
    kept = Detokenizer(TOKENIZER, [], SamplingParams(stop=("lo",), include_stop_str_in_output=True))
    kept.feed(TOKENIZER.encode("hello world"))
    assert kept.cut_at_stop(0) == "lo"
    assert kept.text == "hello"


def test_text_is_the_same_streamed_or_not_and_never_shows_a_part_of_a_stop_string(
    start: Start,
) -> None:
    core = start(tokenizer=True)
    # The toy only draws tokens under 97: bytes and special tokens.
    whole = run(core, request(max_tokens=40, ignore_eos=True))["a"].outputs[0]
    assert whole.token_ids == continuation(PROMPT, 40)
    assert whole.text == core.tokenizer.decode(whole.token_ids)
    stop = whole.text[10:13]
    at = whole.text.index(stop)
    for include in (False, True):
        params = {
            "max_tokens": 40,
            "ignore_eos": True,
            "stop": (stop,),
            "include_stop_str_in_output": include,
        }
        expected = whole.text[: at + 3 * include]
        plain = run(core, request(**params))["a"].outputs[0]
        sink = Sink()
        core.submit([request(**params)], sink, stream=True)
        streamed = sink.results()["a"].outputs[0]
        for out in (plain, streamed):
            assert (out.text, out.finish_reason, out.stop_reason) == (expected, "stop", stop)
            assert stop in core.tokenizer.decode(out.token_ids)
        shown = [o.outputs[0].text for o in sink.items if isinstance(o, RequestOutput)]
        assert all(expected.startswith(text) for text in shown)
        assert shown == sorted(shown, key=len)


def test_a_stop_string_does_not_end_a_sample_below_min_tokens(start: Start) -> None:
    core = start(tokenizer=True)
    whole = run(core, request(max_tokens=40, ignore_eos=True))["a"].outputs[0]
    stop = whole.text[3:5]
    out = run(core, request(max_tokens=40, ignore_eos=True, stop=(stop,), min_tokens=20))["a"]
    assert len(out.outputs[0].token_ids) >= 20


def test_a_stop_id_is_in_the_tokens_but_not_in_the_text(start: Start) -> None:
    core = start(tokenizer=True)
    whole = run(core, request(max_tokens=10, ignore_eos=True))["a"].outputs[0]
    stop = whole.token_ids[6]
    first = whole.token_ids.index(stop)
    for stream in (False, True):
        call = request(max_tokens=10, ignore_eos=True, stop_token_ids=(stop,))
        out = run(core, call, stream=stream)["a"].outputs[0]
        assert out.token_ids == whole.token_ids[: first + 1]
        assert out.text == core.tokenizer.decode(whole.token_ids[:first])


def test_the_chat_template_places_the_special_tokens() -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = TOKENIZER.render_chat(messages)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert ids.count(TOKENIZER.eos_token_id or 0) == 1
    with pytest.raises(InvalidRequest, match="refused"):
        TOKENIZER.render_chat([{"role": "user"}, 3])  # type: ignore[list-item]


def test_of_several_chat_templates_the_one_for_tools_or_the_default_is_taken(
    tmp_path: Path,
) -> None:
    """As Command-R and Hermes have them, in the file's old form and as transformers saves them."""
    messages = [{"role": "developer", "content": "hi"}]
    tools = ChatOptions(tools=({"type": "function", "function": {"name": "look"}},))
    made = make_tokenizer(320)
    made.chat_template = {"default": CHAT_TEMPLATE, "tool_use": "{{ tools[0].function.name }}"}
    made.save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    found = Tokenizer.load(str(tmp_path))
    assert found is not None
    text = found.render_chat(messages)
    assert text == "<|im_start|>system\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert found.render_chat(messages, tools) == "look"
    shutil.rmtree(tmp_path / "additional_chat_templates")
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "tokenizer_config.json"
    said = json.loads(file.read_text())
    said["chat_template"] = [{"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    file.write_text(json.dumps(said))
    found = Tokenizer.load(str(tmp_path))
    assert found is not None
    assert found.render_chat(messages, tools) == "look"
    with pytest.raises(InvalidRequest, match=r"no chat template for this \(it has 'tool_use'\)"):
        found.render_chat(messages)


def test_a_directory_without_tokenizer_gives_none_and_a_broken_one_says_so(tmp_path: Path) -> None:
    assert Tokenizer.load(None) is None
    assert Tokenizer.load(str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        Tokenizer.load(str(tmp_path))


def test_a_chat_template_that_is_wrong_or_empty_is_refused_at_the_start(tmp_path: Path) -> None:
    make_tokenizer(320).save_pretrained(tmp_path)
    (tmp_path / "empty.jinja").touch()
    for empty in ("", " \n", str(tmp_path / "empty.jinja")):
        with pytest.raises(ConfigError, match=r"^chat_template='.*' is empty: give a file or a"):
            Tokenizer.load(str(tmp_path), chat_template=empty)
    wrong = "{{ messages }}\n{% if %}"
    says = "is wrong in line 2: Expected an expression"
    with pytest.raises(ConfigError, match=f"the chat template that chat_template gives {says}"):
        Tokenizer.load(str(tmp_path), chat_template=wrong)
    (tmp_path / "chat_template.jinja").write_text(wrong)
    with pytest.raises(ConfigError, match=f"the chat template of {tmp_path} {says}"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('two messages') }}")
    assert Tokenizer.load(str(tmp_path)) is not None


def test_a_tokenizer_file_that_is_no_json_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(ConfigError, match="cannot be loaded") as refused:
        Tokenizer.load(str(tmp_path))
    assert "\n" not in str(refused.value)


class Shouting(PreTrainedTokenizerFast):
    """A class with verbs of its own, as code of a checkpoint may have them."""

    def __call__(self, text: str, **options: Any) -> Any:
        return super().__call__(text.upper(), **options)

    def _decode(self, *args: Any, **options: Any) -> str:
        return str(super()._decode(*args, **options)).upper()


def shouting() -> Tokenizer:
    made = make_tokenizer(320)
    own = Shouting(tokenizer_object=made.backend_tokenizer, eos_token=made.eos_token)
    return Tokenizer(own)


TOKENIZERS = (TOKENIZER, SLOW, pickle.loads(pickle.dumps(TOKENIZER)), shouting())


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.booleans())
def test_modes_and_copies_of_a_tokenizer_encode_and_decode_alike(text: str, special: bool) -> None:
    text = f"<|im_start|>{text}"
    for tokenizer in TOKENIZERS:
        hf = tokenizer.hugging_face
        ids = hf(text, add_special_tokens=special)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=special) == ids
        shown = tokenizer.decode(ids, skip_special_tokens=special)
        assert shown == hf.decode(ids, skip_special_tokens=special)


def test_what_a_tokenizer_is_asked_for_all_the_time_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hf, calls = make_tokenizer(320), Counter[str]()
    kind = type(hf)
    for name in ("__len__", "get_vocab", "__call__", "decode", "_encode_plus"):
        own = getattr(kind, name)

        def counted(self: Any, *args: Any, own: Any = own, name: str = name, **more: Any) -> Any:
            calls[name] += 1
            return own(self, *args, **more)

        monkeypatch.setattr(kind, name, counted)
    tokenizer = Tokenizer(hf)
    assert (calls["__len__"], calls["get_vocab"]) == (1, 1)
    calls.clear()
    copy = pickle.loads(pickle.dumps(tokenizer))
    calls.clear()
    for one in (tokenizer, copy):
        assert len(one) == 320
        assert one.eos_token_id == hf.eos_token_id
        one.check_length("hi", 2)
        assert one.decode(one.encode("hi")) == "hi"
    assert not calls


def test_a_length_that_the_files_cut_to_is_no_length_of_prompts() -> None:
    hf = make_tokenizer(320)
    hf.backend_tokenizer.enable_truncation(2)
    hf.backend_tokenizer.enable_padding(length=9)
    assert len(Tokenizer(hf).encode("a longer text")) > 2
    assert len(Tokenizer(hf).encode("a")) == 1


def test_without_tokenizer_stop_strings_are_refused(start: Start) -> None:
    core = start()
    with pytest.raises(InvalidRequest, match="stop needs a tokenizer"):
        core.submit([request(stop=("x",))], Sink(), stream=False)
