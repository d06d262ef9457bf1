"""Tiny tokenizers of each kind that checkpoints ship, trained or written in milliseconds."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.fakes.chat_templates import CHATML
from tokenmesh.shared.text import Vocabulary

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "def main(args): return args + 1\n",
    "Gr\u00fc\u00dfe aus K\u00f6ln, na\u00efve caf\u00e9, \u4f60\u597d\u4e16\u754c \U0001f642",
] * 20

WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "##es", "##s"]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def byte_level_bpe(directory: Path, *added: str) -> Path:
    """As Llama 3 and Qwen ship it: tokenizer.json and a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *added],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "config.json", {"vocab_size": 512, "max_position_embeddings": 64})
    return directory


def sentencepiece(directory: Path, kind: str) -> Path:
    """`bpe`: as Llama 2 ships it; `unigram`: as T5 does. A .model file, no tokenizer.json."""
    from sentencepiece import SentencePieceTrainer

    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(CORPUS), encoding="utf-8")
    SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "trained"),
        vocab_size=420 if kind == "bpe" else 120,
        model_type=kind,
        byte_fallback=kind == "bpe",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    name = "tokenizer.model" if kind == "bpe" else "spiece.model"
    (directory / "trained.model").rename(directory / name)
    config: dict[str, object] = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}
    if kind == "bpe":
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": True,
        }
    write_json(directory / "tokenizer_config.json", config)
    return directory


def tekken(directory: Path) -> Path:
    """As Mistral ships it, in tiktoken's manner: ranked byte strings and a pattern."""
    ranked = [bytes([value]) for value in range(256)]
    ranked += [b"th", b"the", b" q", b"ui", b"ck", b" f", b"ox", b" fox", b" qui"]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    write_json(
        directory / "tekken.json",
        {
            "config": {
                "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
                "num_vocab_tokens": len(ranked),
                "default_vocab_size": len(ranked) + 10,
                "default_num_special_tokens": 10,
                "version": "v3",
            },
            "vocab": [
                {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
                for rank, token in enumerate(ranked)
            ],
            "special_tokens": [
                {"rank": rank, "token_str": text, "is_control": True}
                for rank, text in enumerate(special)
            ],
        },
    )
    write_json(directory / "config.json", {"model_type": "mistral", "vocab_size": 275})
    return directory


def wordpiece(directory: Path) -> Path:
    """As BERT ships it: a vocab.txt."""
    (directory / "vocab.txt").write_text("\n".join(WORDPIECES), encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    write_json(directory / "tokenizer_config.json", config)
    return directory


class OpenVocabulary(Vocabulary):
    """A vocabulary that encodes any text, as no gateway does."""

    _tokenizer: Tokenizer

    @classmethod
    def load(cls, tokenizer_json: str, *special_ids: Any) -> Self:
        made = super().load(tokenizer_json, *special_ids)
        made._tokenizer = Tokenizer.from_str(tokenizer_json)
        return made

    @classmethod
    def of(cls, tokenizer: Tokenizer, special_ids: Iterable[int]) -> Self:
        return cls.load(tokenizer.to_str(), special_ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def marker_ids(self, text: str) -> list[int]:
        return self.encode(text)
