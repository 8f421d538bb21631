"""A model's tokenizer and chat template read with `tokenizers` and `jinja2` alone.

Importing transformers and torch takes nine CPU-seconds, which a check on a login node need not wait for. What is
read here gives the same text and the same ids as `transformers.AutoTokenizer`; a folder of which that is not
certain is left to transformers (`read` gives None).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

# transformers rebuilds the first kind from vocabulary and merges, and takes the second as its file has it.
QWEN2_MODELS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
PLAIN_MODELS = ("llama",)
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizer")
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass
class PlainTokenizer:
    """What `tasks.Renderer` needs of a tokenizer, under transformers' names."""

    name_or_path: str
    backend: tokenizers.Tokenizer
    chat_template: str | None
    special_tokens_map: Mapping[str, str]  # bos_token, eos_token, ... -> text
    all_special_tokens: Sequence[str]

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        return dict(self.backend.get_added_tokens_decoder())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: Any,
    ) -> str:
        """The text of a chat; raises jinja2.TemplateError where the template refuses it."""
        assert not tokenize and self.chat_template is not None
        return str(
            _compiled(self.chat_template).render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens_map, **options},
            )
        )

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> Mapping[str, list[list[int]]]:
        found = self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [e.ids for e in found]}

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not clean_up_tokenization_spaces
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))


def read(folder: Path, *, name: str) -> PlainTokenizer | None:
    """The tokenizer in a model's folder, called `name` in messages; None where only transformers can tell.

    Raises ValueError for files that are no JSON or no tokenizer.
    """
    paths = [folder / file for file in ("config.json", "tokenizer_config.json", "tokenizer.json")]
    if not all(path.is_file() for path in paths):
        return None
    model, settings = _json(paths[0]), _json(paths[1])
    kind = _kind(str(model.get("model_type")), str(settings.get("tokenizer_class", "")).removesuffix("Fast"))
    if kind is None or "auto_map" in settings or settings.get("split_special_tokens"):
        return None
    template = _template(folder, settings)
    names = _special(folder, settings, kind)
    if names is None or isinstance(template, Mapping) or re.search(r"\{%-?\s*generation", template or ""):
        return None
    try:
        backend = _backend(paths[2], settings, kind)
    except Exception as error:  # the library raises plain Exception for what it cannot read
        raise ValueError(f"{paths[2]}: {error}; copy the model's folder anew") from None
    if backend is None or not _complete(backend, settings, names):
        return None
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    every = list(dict.fromkeys([*names.values(), *map(str, map(_text, extra))]))
    return PlainTokenizer(name, backend, template, names, every)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}; copy the model's folder anew") from None


def _kind(model_type: str, tokenizer_class: str) -> str | None:
    """`qwen2` or `plain`, as transformers' AutoTokenizer chooses its class; None for any other."""
    if model_type == "qwen2" or (model_type in QWEN2_MODELS and tokenizer_class == "Qwen2Tokenizer"):
        return "qwen2"  # whatever class a qwen2 folder names
    return "plain" if model_type in PLAIN_MODELS and tokenizer_class in PLAIN_CLASSES else None


def _template(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The chat template's text: its own file goes first. A mapping where there are several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    return {t["name"]: t["template"] for t in found} if isinstance(found, list) else found


def _special(folder: Path, settings: Mapping[str, Any], kind: str) -> dict[str, str] | None:
    """The named special tokens; None where tokens of the model's own names complicate it."""
    values = (
        dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>") if kind == "qwen2" else {}
    )
    given = dict(settings)
    path = folder / "special_tokens_map.json"
    if path.is_file() and "added_tokens_decoder" not in settings:
        given |= _json(path)
    own = [k for k, v in given.items() if k.endswith("_token") and k not in NAMED and isinstance(v, str)]
    own += [k for k in ("additional_special_tokens",) if given.get(k) and given.get("extra_special_tokens")]
    if (
        own
        or isinstance(given.get("extra_special_tokens"), dict)
        or given.get("model_specific_special_tokens")
    ):
        return None
    values |= {key: _text(given[key]) for key in NAMED if key in given}
    return {key: values[key] for key in NAMED if values.get(key) is not None}


def _text(token: Any) -> Any:
    return token["content"] if isinstance(token, Mapping) else token


def _backend(path: Path, settings: Mapping[str, Any], kind: str) -> tokenizers.Tokenizer | None:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    found = Tokenizer.from_file(str(path))
    found.no_truncation()
    found.no_padding()
    if kind == "plain":
        return found
    model = found.model
    if not isinstance(model, models.BPE) or model.byte_fallback or model.ignore_merges:
        return None
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    words = pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated", invert=False)
    prefix = bool(settings.get("add_prefix_space"))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    found.normalizer = normalizers.NFC()
    found.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    found.decoder = decoders.ByteLevel()
    return found


def _complete(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Whether the file holds every added token that the settings name, so that transformers would add none."""
    added = backend.get_added_tokens_decoder()
    stated = settings.get("added_tokens_decoder")
    if isinstance(stated, Mapping) and {int(i): _flags(t) for i, t in stated.items()} != {
        i: _flags(t) for i, t in added.items()
    }:
        return False
    special = {t.content for t in added.values() if t.special}
    lists = [settings.get(k) or [] for k in ("additional_special_tokens", "extra_special_tokens")]
    return {*names.values(), *(_text(t) for tokens in lists for t in tokens)} <= special


def _flags(token: Any) -> tuple[Any, ...]:
    keys = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")
    return tuple(token.get(k) if isinstance(token, Mapping) else getattr(token, k) for k in keys)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """The template in the environment that transformers gives it: sandboxed, trimmed, with loop controls."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
