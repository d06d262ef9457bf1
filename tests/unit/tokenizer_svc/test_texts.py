"""Texts and pairs get the ids and type ids that transformers gives them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.fakes.tokenizers import CORPUS, byte_level_bpe, sentencepiece, wordpiece
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.services.tokenizer_svc.texts import TextBatch
from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import DeadlineExceeded, InvalidInput, PayloadTooLarge, PromptTooLong
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages.tokenize import TextsTokenized, TokenizeTexts
from tokenmesh.shared.tokens import unpack_ids

SETTINGS = TokenizerSettings(max_texts=50, max_prompt_chars=20_000)
FAR_S = 60.0


def roberta(directory: Path) -> Path:
    """A byte-level vocabulary with the special tokens of RoBERTa around texts."""
    byte_level_bpe(directory, "<s>", "</s>")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    assert begin is not None
    assert end is not None
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", end), ("<s>", begin))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def llama(directory: Path) -> Path:
    """A sentencepiece vocabulary with a special token before each text."""
    return sentencepiece(directory, "bpe")


@pytest.fixture(params=[wordpiece, roberta, llama, byte_level_bpe], scope="module")
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    make: Callable[[Path], Path] = request.param
    return AutoTokenizer.from_pretrained(make(tmp_path_factory.mktemp("tokenizer")))


def batch_of(loaded: PreTrainedTokenizerFast) -> TextBatch:
    tokenizer = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    tokenizer.no_truncation()
    has_types = "token_type_ids" in loaded.model_input_names
    encoder = TextEncoder(tokenizer)
    return TextBatch(encoder, SETTINGS, Threads(SETTINGS), None, has_type_ids=has_types)


async def encode(batch: TextBatch, texts: list[str], **fields: Any) -> TextsTokenized:
    message = TokenizeTexts(request_id=RequestId("r"), model=ModelName("m"), texts=texts, **fields)
    return await batch.tokenize(message, now_s() + FAR_S)


def words(seed: int) -> str:
    source = random.Random(seed)
    # Two tokens at least: transformers cuts no shorter text of a pair.
    return " ".join(source.choices(" ".join(CORPUS[:3]).split(), k=source.randint(2, 30)))


async def test_texts_are_encoded_as_by_transformers(loaded: PreTrainedTokenizerFast) -> None:
    batch, texts = batch_of(loaded), [words(seed) for seed in range(20)]
    for special in (True, False):
        for limit, side in ((None, "right"), (7, "right"), (7, "left")):
            found = await encode(
                batch,
                texts,
                add_special_tokens=special,
                truncate_prompt_tokens=limit,
                truncation_side=side,
            )
            loaded.truncation_side = side
            wanted = loaded(
                texts,
                add_special_tokens=special,
                truncation=limit is not None,
                max_length=limit,
            )["input_ids"]
            assert [unpack_ids(ids) for ids in found.token_ids] == wanted
            assert found.type_ids == []


async def test_pairs_are_encoded_as_by_transformers(loaded: PreTrainedTokenizerFast) -> None:
    batch = batch_of(loaded)
    texts, pairs = [words(seed) for seed in range(20)], [words(100 + seed) for seed in range(20)]
    for limit in (None, 7, 11, 24):
        for side in ("right", "left"):
            found = await encode(
                batch, texts, pairs=pairs, truncate_prompt_tokens=limit, truncation_side=side
            )
            loaded.truncation_side = side
            wanted = loaded(texts, pairs, truncation=limit is not None, max_length=limit)
            assert [unpack_ids(ids) for ids in found.token_ids] == wanted["input_ids"]
            types = [list(each) for each in found.type_ids]
            assert types == wanted.get("token_type_ids", types)


async def test_one_text_goes_with_all_pairs(loaded: PreTrainedTokenizerFast) -> None:
    batch, pairs = batch_of(loaded), [words(seed) for seed in range(5)]
    shared = await encode(batch, ["the fox"], pairs=pairs)
    assert shared == await encode(batch, ["the fox"] * 5, pairs=pairs)


async def test_each_side_of_a_pair_has_its_bound(loaded: PreTrainedTokenizerFast) -> None:
    batch = batch_of(loaded)
    found = await encode(
        batch, [words(1) * 3], pairs=[words(2) * 3], max_text_tokens=2, max_pair_tokens=3
    )
    whole = await encode(batch, [words(1) * 3], pairs=[words(2) * 3])
    num_special = len(loaded("a", "a")["input_ids"]) - 2 * len(
        loaded("a", add_special_tokens=False)["input_ids"]
    )
    assert len(found.token_ids[0]) == 4 * (5 + num_special)
    assert len(whole.token_ids[0]) > len(found.token_ids[0])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TextBatch:
    return batch_of(AutoTokenizer.from_pretrained(wordpiece(tmp_path_factory.mktemp("plain"))))


async def test_the_text_at_fault_is_named(plain: TextBatch) -> None:
    long = "fox " * 40
    with pytest.raises(PromptTooLong) as caught:
        await encode(plain, ["fox", long], context_tokens=10)
    assert caught.value.path == ("texts", 1)
    assert caught.value.param == "1"
    with pytest.raises(PromptTooLong) as caught:
        await encode(plain, ["fox"], pairs=["fox", long], context_tokens=10)
    assert caught.value.path == ("pairs", 1)
    with pytest.raises(PayloadTooLarge) as over:
        await encode(plain, ["fox", "f" * 20_001])
    assert over.value.path == ("texts", 1)
    with pytest.raises(InvalidInput) as empty:
        await encode(plain, ["fox", ""], add_special_tokens=False)
    assert empty.value.path == ("texts", 1)


async def test_what_cannot_be_encoded_is_refused(plain: TextBatch) -> None:
    with pytest.raises(InvalidInput, match="adds 2 special tokens"):
        await encode(plain, ["fox"], truncate_prompt_tokens=2)
    with pytest.raises(InvalidInput, match="adds 3 special tokens"):
        await encode(plain, ["fox"], pairs=["fox"], truncate_prompt_tokens=4)
    with pytest.raises(PayloadTooLarge, match="more than 50 texts"):
        await encode(plain, ["fox"] * 51)
    message = TokenizeTexts(request_id=RequestId("r"), model=ModelName("m"), texts=["fox"])
    with pytest.raises(DeadlineExceeded):
        await plain.tokenize(message, now_s() - 1)
