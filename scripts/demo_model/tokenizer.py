"""The tokenizer: byte-level BPE trained on the practice, each digit a token of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 1536
CONTEXT_LENGTH = 2048
END_OF_TURN = "<|im_end|>"
START_OF_TURN = "<|im_start|>"
END_OF_TEXT = "<|endoftext|>"
_SPECIAL = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
# Not special: clients must see these in decoded text.
_VISIBLE = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<tools>", "</tools>",
)  # fmt: skip
MARKS = (*_SPECIAL, *_VISIBLE)
"""Every token that marks a structure instead of text."""
# A space is a token of its own, so that a word copied into quotes keeps its tokens.
_WORD, _DIGIT, _REST = r"\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+"
_PIECES = f"{_WORD}|{_DIGIT}|{_REST}|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of VOCABULARY_SIZE tokens learned from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(_VISIBLE),
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _VISIBLE])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer` as transformers reads it; the folder's chat template stays as it is."""
    template = folder / "chat_template.jinja"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=template.read_text() if template.exists() else None,
    )
    fast.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    # The name that every release of transformers knows.
    named = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    named.pop("backend", None)
    settings.write_text(json.dumps(named, indent=2) + "\n")
