"""Text to ids and back for one model: truncation, checks, bad words. Safe to call from threads."""

from typing import Literal

from tokenizers import Encoding, Tokenizer

from tokenmesh.shared.errors import InvalidInput

Side = Literal["left", "right"]


def encode_text(
    tokenizer: Tokenizer,
    text: str,
    *,
    add_special_tokens: bool,
    max_tokens: int | None = None,
    side: Side = "left",
) -> list[int]:
    """The ids of a text; truncation keeps the added special tokens, as in transformers.

    `side` names the end that is cut off.
    """
    if max_tokens is None:
        return _encode(tokenizer, text, add_special_tokens).ids
    encoding = _encode(tokenizer, text, False)
    num_special = tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
    encoding.truncate(max(0, max_tokens - num_special), direction=side)
    if add_special_tokens:
        encoding = tokenizer.post_process(encoding)
    return encoding.ids


def truncate_ids(ids: list[int], max_tokens: int | None, side: Side) -> list[int]:
    """At most `max_tokens` of the ids; `side` names the end that is cut off."""
    if max_tokens is None or len(ids) <= max_tokens:
        return ids
    return ids[-max_tokens:] if side == "left" else ids[:max_tokens]


def check_ids(ids: list[int], vocab_size: int, param: str = "prompt") -> None:
    """Raise InvalidInput with the position of the first id that is out of range."""
    if ids and max(ids) < vocab_size:
        return
    for position, token in enumerate(ids):
        if token >= vocab_size:
            raise InvalidInput(
                f"token id {token} at position {position} is out of range [0, {vocab_size})",
                param=param,
            )


def token_limit(requested: int | None, max_model_len: int | None) -> int | None:
    """`truncate_prompt_tokens` as a number of tokens; None: no truncation."""
    if requested is None:
        return None
    if requested == -1:
        return max_model_len
    if requested < 1:
        raise InvalidInput(
            f"truncate_prompt_tokens must be at least 1, or -1 for the model's length; "
            f"got {requested}",
            param="truncate_prompt_tokens",
        )
    return requested


def bad_words_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Each word's ids at the start of a text, and after a space where those differ, as in vLLM."""
    sequences: list[list[int]] = []
    for index, word in enumerate(words):
        bare = word.lstrip()
        plain = tokenizer.encode(bare, add_special_tokens=False).ids
        if not plain:
            raise InvalidInput(f"bad_words[{index}] is empty", param="bad_words")
        sequences.append(plain)
        spaced = tokenizer.encode(f" {bare}", add_special_tokens=False).ids
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    return sequences


def token_strings(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The vocabulary entry of each id; empty for padding ids."""
    return [tokenizer.id_to_token(token) or "" for token in ids]


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Encoding:
    # Only the batch form can omit offsets, which take a fifth of the time.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding
