"""Text to tokens and back: byte-level BPE, special tokens only where the caller asks, chat, fill-in-the-middle.

The `tokenizers` library does the work. Here is what a decoder needs around it: a user's text that can never turn into
a control token, a chat template in a sandbox, and a stream that never prints half a character.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from tokenizers import decoders, models

from nanoqwen.config import read_object

ALWAYS_STOP = ("<|endoftext|>", "<|im_end|>")
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


class Tokenizer:
    """A byte-level BPE tokenizer of the Qwen2 family.

    Attributes:
        num_tokens: ids 0 … num_tokens − 1 are real; a model's further rows are padding.
        special: text → id of every added token: control tokens, fill-in-the-middle, tool tags.
        eos_ids: ids that end a reply.
        chat_template: Jinja source, or None.

    Raises:
        ValueError: the tokenizer is of another kind than byte-level BPE.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: Mapping | None = None, chat_template: str | None = None
    ):
        if not isinstance(backend.model, models.BPE) or not isinstance(backend.decoder, decoders.ByteLevel):
            raise ValueError(
                f"model {type(backend.model).__name__} with decoder {type(backend.decoder).__name__}; "
                "nanoqwen reads byte-level BPE"
            )
        backend.no_truncation()
        backend.no_padding()
        self._parse = backend
        # The same vocabulary without its added tokens: what a user's text goes through. The library's own switch
        # (`encode_special_tokens`) spares only those marked special, and Qwen's <|fim_prefix|> is not.
        self._plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        self.settings, self.chat_template = dict(settings or {}), chat_template
        self.num_tokens = 1 + max(backend.get_vocab().values())
        self.special = {token.content: i for i, token in sorted(backend.get_added_tokens_decoder().items())}
        stops = (_content(self.settings.get("eos_token")), *ALWAYS_STOP)
        self.eos_ids = tuple(dict.fromkeys(self.special[text] for text in stops if text in self.special))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a folder with `tokenizer.json` (and the settings and template beside it), that file, or a GGUF.

        Raises:
            FileNotFoundError: there is no `tokenizer.json`.
            ValueError: a file is damaged or holds another kind of tokenizer; the message names it.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            from nanoqwen.gguf_convert import convert

            path = convert(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; a tokenizer is read from tokenizer.json")
        beside = file.with_name("tokenizer_config.json")
        settings = read_object(beside) if beside.is_file() else {}
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if (jinja := file.with_name("chat_template.jinja")).is_file():
            template = jinja.read_text(encoding="utf-8")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)), settings, template)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file}: cannot be read as a tokenizer ({error})") from None

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of `text`. `<|im_end|>` and its like are plain text, or one control token if `allow_special`.

        Raises:
            ValueError: `text` holds a lone surrogate, which no UTF-8 text can; the message gives its position.
        """
        backend = self._parse if allow_special else self._plain
        return backend.encode(_characters(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. `skip_special` leaves control tokens out.

        Raises:
            ValueError: an id outside 0 … num_tokens − 1.
        """
        ids = [self._check(i) for i in ids]
        return self._parse.decode(ids, skip_special_tokens=skip_special)

    @property
    def prompt_only(self) -> tuple[int, ...]:
        """Ids that stand in prompts and not in answers, for `Sampler.suppress`: fill-in-the-middle marks and turns."""
        marks = (*FIM, "<|fim_pad|>", "<|im_start|>")
        return tuple(self.special[text] for text in marks if text in self.special)

    def fim(self, prefix: str, suffix: str) -> list[int]:
        """The prompt that asks for the text between `prefix` and `suffix` (Bavarian et al., 2022; Qwen's order P S M).

        Raises:
            ValueError: the tokenizer has no fill-in-the-middle tokens.
        """
        if missing := [text for text in FIM if text not in self.special]:
            raise ValueError(
                f"this tokenizer has no {', '.join(missing)}: its model was not trained to fill in the middle"
            )
        before, after, middle = (self.special[text] for text in FIM)
        return [before, *self.encode(prefix), after, *self.encode(suffix), middle]

    def chat(self, messages: Sequence[Mapping], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, by the model's own template.

        Only the template writes control tokens; inside a message they are plain text.

        Args:
            messages: mappings with `role` and `content`, oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            ValueError: no template, a template that fails or reaches outside its sandbox, or no messages.
        """
        if not self.chat_template:
            raise ValueError("this tokenizer has no chat template: its model was not trained to chat; use encode()")
        if not messages:
            raise ValueError("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hello'}")
        shield = _Shield(list(self.special), [*_strings(messages), self.chat_template])
        text = _characters(self._render(shield.cover(list(messages)), add_generation_prompt))
        # Find the template's own control tokens, then encode what lies between them as plain text: this is what
        # the library does too, so harmless messages get the same ids as from one encode(allow_special=True).
        own = set(self.special.values())
        found = self._parse.encode(text, add_special_tokens=False)
        ids, start = [], 0
        for i, (begin, end) in zip(found.ids, found.offsets, strict=True):
            if i in own:
                ids += [*self.encode(shield.uncover(text[start:begin])), i]
                start = end
        return ids + self.encode(shield.uncover(text[start:]))

    def stream(self, skip_special: bool = False) -> "Detokenizer":
        """A detokenizer for one reply: `put` ids as they come, `end` when they stop."""
        return Detokenizer(self, skip_special)

    def token_bytes(self, i: int) -> bytes:
        """The bytes that token `i` stands for: often a part of a character only."""
        text = self._parse.id_to_token(self._check(i))
        if text is None:
            return b""
        try:
            return bytes(_BYTES[c] for c in text)
        except KeyError:  # an added token's text is stored as it is
            return text.encode("utf-8")

    def _check(self, i: int) -> int:
        if not 0 <= i < self.num_tokens:
            raise ValueError(f"token id {i} is outside the tokenizer's 0 … {self.num_tokens - 1}")
        return int(i)

    @cached_property
    def _skipped(self) -> frozenset[int]:
        return frozenset(i for i, token in self._parse.get_added_tokens_decoder().items() if token.special)

    def _render(self, messages: list, add_generation_prompt: bool) -> str:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: text for name in names if (text := _content(self.settings.get(name)))}
        try:
            template = _Sandbox().from_string(self.chat_template)
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **tokens
            )
        except Exception as error:  # a template is a program of the file's: whatever it raises is its fault
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from None


class Detokenizer:
    """Ids in, text out, whole characters only: all `put`s and the `end` together are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer, self._skip = tokenizer, tokenizer._skipped if skip_special else frozenset()
        # Holds the bytes of an unfinished character; invalid ones become U+FFFD, as in decode().
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, i: int) -> str:
        """The text that is certain once token `i` has come: often several characters, at times none."""
        return "" if i in self._skip else self._utf8.decode(self._tokenizer.token_bytes(i))

    def end(self) -> str:
        """What was held back: nothing, or U+FFFD for a character that was never finished. Ready for the next reply."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class _Shield:
    """Hides special tokens that stand in a user's text while the template runs.

    Each becomes two characters: a mark that occurs nowhere in the messages or the template, and a number. Text that
    ends in a token's beginning (or begins with a token's end) gets a lone mark there, so that neither the template's
    text nor another message can complete it.
    """

    def __init__(self, special: list[str], texts: list[str]):
        seen = set().union(*texts)
        # U+FDD0 and on: Unicode sets them aside as "noncharacters", so the first is nearly always free.
        self.mark = next(c for c in map(chr, range(0xFDD0, 0x110000)) if c not in seen)
        longest_first = sorted(special, key=len, reverse=True)
        self.number = {text: chr(0xF0000 + n) for n, text in enumerate(longest_first)}
        self.text = {number: text for text, number in self.number.items()}
        self.whole = re.compile(_any(special))
        starts = {text[:n] for text in special for n in range(1, len(text))}
        ends = {text[n:] for text in special for n in range(1, len(text))}
        self.start = re.compile(f"({_any(starts)})(?=\\s*$)")
        self.end = re.compile(f"^(\\s*)(?={_any(ends)})")

    def cover(self, value):
        """`value` (strings, lists, mappings) with every special token in it hidden."""
        if isinstance(value, str):
            value = self.whole.sub(lambda m: self.mark + self.number[m[0]], value)
            value = self.start.sub(rf"\1{self.mark}{_NOTHING}", value)
            return self.end.sub(rf"\1{self.mark}{_NOTHING}", value)
        if isinstance(value, Mapping):
            return {self.cover(key): self.cover(item) for key, item in value.items()}
        return [self.cover(item) for item in value] if isinstance(value, (list, tuple)) else value

    def uncover(self, text: str) -> str:
        """The user's own text again."""
        return re.sub(f"{self.mark}({_any({*self.text, _NOTHING})})?", lambda m: self.text.get(m[1], ""), text)


_NOTHING = chr(0xEFFFF)


def _strings(value) -> Iterator[str]:
    """Every string in a message: in its mappings' keys and values, and in its lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _any(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it: `transformers`' settings, filters and helpers, and no way out."""

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        # Jinja's own tojson escapes < and > for HTML.
        self.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self.globals["raise_exception"] = _raise

    def unsafe_undefined(self, obj, attribute):
        raise SecurityError(f"it asks for {attribute!r} of a {type(obj).__name__}, which is outside its sandbox")


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _characters(text: str) -> str:
    """`text`, once it is known to be whole characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has a lone surrogate {text[error.start]!r} at position {error.start}; it is half of a UTF-16 "
            "pair and not a character: decode the source with errors='replace'"
        ) from None
    return text


def _content(token) -> str | None:
    """A special token in `tokenizer_config.json`: its text, or a mapping that holds it."""
    return token.get("content") if isinstance(token, Mapping) else token


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet (Radford et al., 2019): printable Latin-1 for itself, the rest from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTES = _byte_alphabet()
