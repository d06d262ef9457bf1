"""LLM: the engine as a library."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.grammars import EOS, json_schema, make_checkpoint
from tests.fakes.pool_driver import PoolDriver
from tests.fakes.poolers import ENCODERS, make_pooler, prompts, write_modules
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine import LLM
from tokenmesh.shared.errors import InvalidInput, PromptTooLong
from tokenmesh.shared.messages.pooling import PoolingParams
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.structured import Structured

SETTINGS: Final[dict[str, Any]] = {"device": "cpu", "num_gpu_blocks_override": 256}


def sampled(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, **fields)


def test_streams_are_those_of_an_engine_with_the_same_settings_and_seeds(tiny: Tiny) -> None:
    directory = tiny("llama").directory
    given = [prompt_of(length, seed=length) for length in (5, 40, 40, 9)]
    sampling = [greedy(8), sampled(3, logprobs=2), sampled(4), sampled(5)]
    jobs = [Job(ids, each) for ids, each in zip(given, sampling, strict=True)]
    expected = EngineDriver(directory).run(jobs)
    llm = LLM(str(directory), dtype="float32", max_num_seqs=2, **SETTINGS)
    for _ in range(2):
        completions = llm.generate(given, sampling)
        assert [each.token_ids for each in completions] == [e.token_ids for e in expected]
        assert [each.finish_reason for each in completions] == ["length"] * 4
        assert [len(each.logprobs) for each in completions] == [0, 12, 0, 0]
    assert completions[1].num_cached == 32


def test_a_bad_prompt_is_refused_before_any_other_is_computed(tiny: Tiny) -> None:
    llm = LLM(str(tiny("llama").directory), max_model_len=64, **SETTINGS)
    bad: tuple[list[int], ...] = ([], [5, 10**6])
    for each in bad:
        with pytest.raises(InvalidInput, match="no token, or one"):
            llm.generate([[5, 6], each], greedy(8))
    with pytest.raises(PromptTooLong):
        llm.generate([[5, 6], [5] * 60], greedy(8))
    with pytest.raises(InvalidInput, match="top_p"):
        llm.generate([[5, 6]], SamplingParams(seed=0, max_tokens=3, top_p=2.0))
    with pytest.raises(InvalidInput, match="does not pool"):
        llm.embed([[5, 6]])
    with pytest.raises(ValueError, match="max_seqs"):
        LLM(str(tiny("llama").directory), max_seqs=3)
    (completion,) = llm.generate([[5, 6]], greedy(8))
    assert (len(completion.token_ids), completion.num_cached) == (8, 0)


def test_a_constrained_stream_follows_its_grammar(tmp_path: Path) -> None:
    llm = LLM(str(make_checkpoint(tmp_path)), **SETTINGS)
    structured = json_schema({"enum": ["yes", "no"]})
    sampling = [
        SamplingParams(seed=seed, max_tokens=30, structured=structured) for seed in range(4)
    ]
    completions = llm.generate(["Is it?"] * 4, sampling)
    assert {each.text for each in completions} <= {'"yes"', '"no"'}
    assert all(each.token_ids[-1] == EOS for each in completions)
    impossible = SamplingParams(seed=0, max_tokens=3, structured=Structured(kind="regex", text="("))
    with pytest.raises(InvalidInput):
        llm.generate(["x"], impossible)
    (answer,) = llm.chat([[{"role": "user", "content": "x"}]], sampling[0])
    assert answer.text in ('"yes"', '"no"')


def test_embeddings_are_those_of_an_engine_that_pools(tmp_path: Path) -> None:
    make_pooler(ENCODERS["bert"], "Model").save_pretrained(tmp_path)
    write_modules(tmp_path)
    given = prompts(7, 20, 3)
    expected = PoolDriver(tmp_path).run(given)
    llm = LLM(str(tmp_path), dtype="float32", **SETTINGS)
    for one, other in zip(llm.embed(given), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    with pytest.raises(InvalidInput, match="does not generate"):
        llm.generate(given, greedy(3))


def test_shares_come_with_the_names_of_the_labels(tmp_path: Path) -> None:
    labels = {0: "bad", 1: "good"}
    model = make_pooler(
        ENCODERS["bert"], "ForSequenceClassification", num_labels=2, id2label=labels
    )
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", **SETTINGS)
    (shares,) = llm.classify([[5, 6, 7]])
    (expected,) = PoolDriver(tmp_path).run([[5, 6, 7]], PoolingParams(task="classify"))
    assert list(shares) == ["bad", "good"]
    assert list(shares.values()) == pytest.approx(expected.tolist(), abs=1e-5)


WORDS: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fox", "is", "an", "animal", "stone")


def write_word_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    wrapped.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    wrapped.save_pretrained(directory)
    return wrapped


PAIRS = [("a fox", "an animal"), ("a fox is", "a stone"), ("fox", "a fox is an animal")]


def test_scores_are_those_of_the_reranker(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=1)
    model.save_pretrained(tmp_path)
    tokenizer = write_word_tokenizer(tmp_path)
    scores = LLM(str(tmp_path), dtype="float32", **SETTINGS).score(PAIRS)
    with torch.no_grad():
        inputs = (tokenizer(*pair, return_tensors="pt") for pair in PAIRS)
        expected = [model(**each).logits.sigmoid().item() for each in inputs]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(each, 5) for each in scores}) == 3


def test_without_a_reranker_scores_are_cosines_of_embeddings(tmp_path: Path) -> None:
    make_pooler(ENCODERS["bert"], "Model").save_pretrained(tmp_path)
    write_modules(tmp_path)
    write_word_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", **SETTINGS)
    first, second = llm.embed(PAIRS[0])
    cosine = first @ second / (np.linalg.norm(first) * np.linalg.norm(second))
    assert llm.score(PAIRS[:1]) == pytest.approx([float(cosine)], abs=1e-5)


def test_a_reranker_with_a_template_of_its_own_is_refused(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=1)
    model.save_pretrained(tmp_path)
    write_word_tokenizer(tmp_path)
    config: dict[str, Any] = {"modality_config": {"message": {}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="template"):
        LLM(str(tmp_path), **SETTINGS).score(PAIRS)


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"nats", "redis", "hiredis", "fastapi", "opentelemetry"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from tokenmesh.engine import LLM
from tokenmesh.shared.messages.sampling import SamplingParams
llm = LLM(sys.argv[1], device="cpu", num_gpu_blocks_override=64)
(one,) = llm.generate([[5, 6, 7]], SamplingParams(seed=0, max_tokens=4, ignore_eos=True))
print(len(one.token_ids), any(name.startswith("tokenmesh.services") for name in sys.modules))
"""


def test_it_runs_where_the_libraries_of_the_mesh_are_not_installed(tiny: Tiny) -> None:
    command = [sys.executable, "-c", BLOCKED, str(tiny("llama").directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=18, check=False)
    assert done.stdout.split() == ["4", "False"], done.stderr
