"""Text to token ids and back, with the tokenizer files of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollout.errors import ConfigError, InvalidRequest, PromptTooLong
from rollout.generation import ChatOptions, SamplingParams
from rollout.loader import has_tokenizer

_AS_IT_COMES = ChatOptions()
_HELLO = [{"role": "user", "content": "hello"}]
_LONGEST = 64  # characters that one token is allowed to stand for, at least


class Tokenizer:
    """A Hugging Face tokenizer behind the few verbs an engine needs. Thread-safe for reading."""

    def __init__(self, hf: Any, chat_template: str | None = None, *, slow: bool = False) -> None:
        self._hf = hf
        # Asked for with every request; a wrapper looks them up anew each time.
        self._length: int = len(hf)
        self._eos: int | None = hf.eos_token_id
        self._templates: Mapping[str, str] | str | None = chat_template or hf.chat_template
        self.chat_template = self._template(())
        # The Rust object does the same in less time, but for classes that bring verbs of their own
        # and for those that clean up spaces.
        rust = hf.backend_tokenizer if hf.is_fast and not slow else None
        clean = getattr(hf, "clean_up_tokenization_spaces", False)
        self._decoder = None if clean or not _inherits(hf, "decode", "_decode") else rust
        self._encoder = rust if _inherits(hf, "__call__", "_encode_plus") else None
        if self._encoder is not None:  # as the wrapper has it set up in each call
            self._encoder.no_truncation()
            self._encoder.no_padding()
            self._encoder.encode_special_tokens = hf.split_special_tokens
        self._longest = max(_LONGEST, max(map(len, hf.get_vocab()), default=0))

    @classmethod
    def load(
        cls,
        path: str | None,
        *,
        chat_template: str | None = None,
        slow: bool = False,
        trust_remote_code: bool = False,
        code_revision: str | None = None,
    ) -> Tokenizer | None:
        """Load from a directory; None when it holds none, or an empty one.

        ``chat_template``: a file or a text in the place of the tokenizer's own. ``slow``: through
        transformers' wrapper alone. ``trust_remote_code``: run code that lies with it, of
        ``code_revision`` where that is a hub id's. Raises ``ConfigError`` naming ``path`` when
        files are there but cannot be used.
        """
        if path is None or not has_tokenizer(Path(path)):
            return None
        from transformers import AutoTokenizer  # slow to import: only where there is one

        try:
            hf = AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code, code_revision=code_revision
            )
        except Exception as error:  # the Rust part and the hub's checks raise classes of their own
            raise ConfigError(
                f"the tokenizer of {path} cannot be loaded: {' '.join(str(error).split())}; mend "
                "its files or pass skip_tokenizer_init=True to serve token ids only"
            ) from error
        if hf is None or len(hf) == 0:
            return None
        template = None if chat_template is None else _template_text(chat_template)
        _check_template(hf, template, path)
        return cls(hf, template, slow=slow)

    def shares_ids(self, other: Tokenizer) -> bool:
        """Whether most ids mean the same in both; releases of one family differ in a few."""
        own, others = self._hf.get_vocab(), other._hf.get_vocab()
        alike: int = sum(own.get(token) == index for token, index in others.items())
        fewest: int = min(len(own), len(others))
        return 10 * alike >= 9 * fewest

    @property
    def hugging_face(self) -> Any:
        """The tokenizer of transformers, for libraries that want that."""
        return self._hf

    @property
    def path(self) -> str:
        """Where it was loaded from."""
        return str(self._hf.name_or_path)

    @property
    def eos_token_id(self) -> int | None:
        return self._eos

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raise ``PromptTooLong``, without tokenising, for text that cannot fit ``max_tokens``.

        No token stands for more characters than the longest of the vocabulary, or than 64 where
        that is shorter; a tokenizer that folds a longer run of characters (unknown ones, say) into
        one token is held to the same bound.
        """
        if len(text) > max_tokens * self._longest:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, more than max_model_len {max_tokens} "
                f"tokens can stand for (at most {self._longest} characters each)"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt; the tokenizer's own rule decides about BOS.

        Raises ``InvalidRequest`` for halves of surrogate pairs, which JSON can carry and text not.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the prompt is not Unicode text: {error}") from None
        if self._encoder is not None:
            # Unlike ``encode``, this lets other threads run meanwhile, and finds no offsets.
            found = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(found[0].ids)
        ids: list[int] = self._hf(text, add_special_tokens=add_special_tokens)["input_ids"]
        return list(ids)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = _AS_IT_COMES
    ) -> str:
        """The text of a conversation by the chat template; raises ``InvalidRequest``.

        A template that knows no role "developer" gets "system" for it.
        """
        template = self._template(options.tools)
        if not template:
            held = self._templates if isinstance(self._templates, Mapping) else ()
            other = f" for this (it has {', '.join(map(repr, held))})" if held else ""
            raise InvalidRequest(
                f"the tokenizer has no chat template{other}: send a plain prompt, or start the "
                "engine with chat_template=FILE"
            )
        if options.tools and "tools" not in template:
            raise InvalidRequest("the chat template takes no tools; leave them out")
        try:
            text: str = self._hf.apply_chat_template(
                [_known_role(message, template) for message in messages],
                tools=[dict(tool) for tool in options.tools] or None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=options.begins_turn,
                continue_final_message=options.continue_final_message,
                **options.chat_template_kwargs,
            )
        except Exception as error:  # a template is a program: what it raises is about its input
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error
        return text

    def _template(self, tools: Sequence[object]) -> str | None:
        """Of several, as Command-R has them, the one that transformers takes."""
        held = self._templates
        if not isinstance(held, Mapping):
            return held
        return (held.get("tool_use") if tools else None) or held.get("default")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str
        if self._decoder is not None:
            text = self._decoder.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        else:
            text = self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def __len__(self) -> int:
        return self._length


def _inherits(hf: Any, *verbs: str) -> bool:
    """Whether its class has these as transformers' wrapper of the Rust object has them."""
    from transformers import PreTrainedTokenizerFast

    own, base = type(hf), PreTrainedTokenizerFast
    return all(getattr(own, verb, None) is getattr(base, verb) for verb in verbs)


def _template_text(given: str) -> str:
    """Of a file, or the text itself; whatever has braces in it is a text."""
    text = given
    if given and "{" not in given and "\n" not in given:
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"the chat template {given} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(
            f"chat_template={given!r} is empty: give a file or a text, or leave it out for the "
            "tokenizer's own"
        )
    return text


def _check_template(hf: Any, given: str | None, path: str) -> None:
    """``ConfigError`` where the template, ``given`` or the tokenizer's own, is no Jinja.

    Else every chat would fail, and its messages be blamed.
    """
    from jinja2 import TemplateSyntaxError

    try:
        hf.apply_chat_template(_HELLO, chat_template=given, tokenize=False)
    except TemplateSyntaxError as error:
        whose = f"of {path}" if given is None else "that chat_template gives"
        raise ConfigError(
            f"the chat template {whose} is wrong in line {error.lineno}: {error.message}; mend it, "
            "or give another by chat_template=FILE"
        ) from error
    except Exception:  # noqa: BLE001 - there may be none, or one that asks for other messages
        return


def _known_role(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    if dict(message).get("role") == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    return dict(message)


# Prompt tokens decoded along, so that a first token knows whether a space leads it: more where so
# few begin inside a character.
_CONTEXT, _LONGEST_CONTEXT = 5, 24
_INCOMPLETE = "\ufffd"
_PENDING = 8  # tokens; a character has 4 bytes, so no more than that are the pieces of one


class Decodes(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


def _context(tokenizer: Decodes, prompt: Sequence[int], skip: bool) -> list[int]:
    """The end of a prompt, begun where a character begins if that is near."""
    for count in range(_CONTEXT, min(_LONGEST_CONTEXT, len(prompt)) + 1):
        tail = list(prompt[-count:])
        if _INCOMPLETE not in tokenizer.decode(tail, skip_special_tokens=skip):
            return tail
    return list(prompt[-_CONTEXT:])


class Detokenizer:
    """Grows ``text`` as tokens come; a token that ends inside a character waits for the next.

    The prefix-offset algorithm of text-generation-inference: decode a short window with and
    without the new tokens, and keep the difference. Stop strings are found in new text only.
    """

    __slots__ = (
        *("_ids", "_params", "_prefix", "_prompt", "_read", "_stop", "_tokenizer"),
        *("hold", "text"),
    )

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._prompt = _context(tokenizer, prompt, params.skip_special_tokens)
        self._ids = self._prompt[:]
        self._prefix = 0
        self._read = len(self._ids)
        self._stop = params.stop
        longest = max(map(len, params.stop), default=0)
        # Text that may yet turn out to begin a stop string is not shown.
        self.hold = 0 if params.include_stop_str_in_output else max(longest - 1, 0)
        self.text = ""

    def feed(self, token_ids: Sequence[int], *, final: bool = False) -> None:
        """Add tokens; ``final`` shows even the pieces of an incomplete character, as is done with
        more tokens than can be one.

        Of several tokens as many are shown as if they had come one by one.
        """
        ids = self._ids
        done = len(ids)
        ids.extend(token_ids)
        # What no piece is among is shown at once; few tokens at its end may be the pieces of one.
        for end in range(len(ids), max(done, len(ids) - _PENDING), -1):
            new = self._new(end)
            if new and _INCOMPLETE not in new:
                self._show(new, end)
                done = end
                break
        for end in range(done + 1, len(ids) + 1):
            new = self._new(end)
            if (new and not new.endswith(_INCOMPLETE)) or end - self._read > _PENDING:
                self._show(new, end)
        if final and self._read < len(ids):
            self._show(self._new(len(ids)), len(ids))

    def _new(self, end: int) -> str:
        """What the tokens up to ``end`` add to those that are shown."""
        window, skip = self._ids[self._prefix : end], self._params.skip_special_tokens
        decode = self._tokenizer.decode
        old = decode(window[: self._read - self._prefix], skip_special_tokens=skip)
        return decode(window, skip_special_tokens=skip)[len(old) :]

    def _show(self, new: str, end: int) -> None:
        self.text += new
        self._prefix, self._read = self._read, end

    def make(self, token_ids: Sequence[int]) -> None:
        """The text of all tokens of a sample that has ended, in the place of what there was."""
        self._ids, self._prefix, self._read = self._prompt[:], 0, len(self._prompt)
        self.text = ""
        self.feed(token_ids, final=True)

    def cut_at_stop(self, new_from: int) -> str | None:
        """The stop string that ends first in the text from ``new_from`` on; ``text`` is cut there.

        ``new_from`` is the length of the text before the last ``feed``.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(0, new_from - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        end, at, stop = best
        self.text = self.text[: end if self._params.include_stop_str_in_output else at]
        return stop

    def visible(self, finished: bool) -> str:
        """What may be shown now: all of it once finished, else without the held-back tail."""
        if finished or not self.hold:
            return self.text
        return self.text[: -self.hold]
