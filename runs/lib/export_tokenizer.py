"""The tokenizer of a run for the `tokenizers` library, transformers and llama.cpp."""

import json
from pathlib import Path
from typing import NamedTuple

from gguf.vocab import bytes_to_unicode
from lib.chat_format import ASSISTANT_END, TURN_TOKENS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

CHAT_TEMPLATE = Path(__file__).with_name("export_chat.jinja")


class Vocabulary(NamedTuple):
    """A tokenizer as other libraries take it."""

    content: dict  # tokenizer.json of the `tokenizers` library
    pattern: str  # by which text is split
    specials: dict[str, int]
    bos: str  # begins a text
    end: str  # ends an answer; in a base model bos, which ends the text before
    pad: str
    template: str = ""  # Jinja, of chats


def to_merges(ranks: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Merges in order of priority: for each token all pairs of tokens that spell it."""
    index = {token: rank for rank, token in enumerate(ranks)}
    merges = []
    for token in ranks:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        merging = [pair for pair in pairs if pair[0] in index and pair[1] in index]
        merges += sorted(merging, key=lambda pair: (index[pair[0]], index[pair[1]]))
    return merges


def convert_tokenizer(pattern: str, ranks: list[bytes], specials: dict[str, int], bos: str) -> dict:
    """tokenizer.json of the `tokenizers` library; bos leads every text.

    Text encodes as with the project's own. Text that spells a special token does with
    split_special_tokens=True.
    """
    letters = bytes_to_unicode()
    spell = lambda token: "".join(letters[b] for b in token)
    vocab = {spell(token): rank for rank, token in enumerate(ranks)}
    merges = [(spell(left), spell(right)) for left, right in to_merges(ranks)]
    # A word that is a token is that token, whether or not merges lead there.
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    tokenizer.decoder = decoders.ByteLevel()
    special = [(bos, specials[bos])]
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", special)
    tokenizer.add_special_tokens(sorted(specials, key=specials.get))
    return json.loads(tokenizer.to_str())


def read_vocabulary(tokenizer, is_chat: bool = False) -> Vocabulary:
    """The tokenizer of a run for other libraries."""
    specials = tokenizer.specials
    bos = next(text for text, i in specials.items() if i == tokenizer.bos_id)
    content = convert_tokenizer(tokenizer.pattern, list(tokenizer.mergeable), specials, bos)
    end = ASSISTANT_END if is_chat else bos
    # Padding differs from the end, which collators would not teach otherwise.
    pad = "<|output_end|>" if end == bos and "<|output_end|>" in specials else bos
    has_turns = specials.keys() >= {*TURN_TOKENS}
    template = CHAT_TEMPLATE.read_text(encoding="utf-8") if has_turns else ""
    return Vocabulary(content, tokenizer.pattern, specials, bos, end, pad, template)
