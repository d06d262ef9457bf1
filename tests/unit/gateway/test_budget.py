"""Budget: what a prompt says about reasoning, so that its words are not taken for markers."""

import pytest
from tokenizers import Tokenizer

from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.services.gateway.budget import Budget
from tokenmesh.services.gateway.parsers.formats import Family
from tokenmesh.services.gateway.parsers.registry import ParserRegistry
from tokenmesh.services.gateway.parsing import Parsing
from tokenmesh.shared.text import Vocabulary
from tokenmesh.shared.tokens import pack_ids

TOLD = "Think in <think> tags.\nassistant\n"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("think")
    byte_level_bpe(folder, "<think>", "</think>")
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return Vocabulary(tokenizer, tokenizer.get_added_tokens_decoder())


@pytest.mark.parametrize(
    ("parser", "prompt", "continues", "spent"),
    [
        ("qwen3", "Hi\n<think>", False, ""),
        ("qwen3", "Hi\n<think>\n", False, "\n"),
        ("qwen3", TOLD, False, None),
        ("qwen3", f"{TOLD}<think>\n", False, "\n"),
        ("qwen3", "Hi\n<think>\n\n</think>\n\n", False, None),
        ("qwen3", "Hi\n<think>a thought", False, None),
        ("qwen3", "Hi\n<think>a thought", True, "a thought"),
        ("qwen3", "Hi\n<think>a thought</think>and", True, None),
        ("deepseek_r1", TOLD, False, ""),
        ("deepseek_r1", "Hi\n<think>\n", False, "\n"),
    ],
)
def test_what_the_prompt_has_spent(
    vocabulary: Vocabulary, parser: str, prompt: str, continues: bool, spent: str | None
) -> None:
    family = Family(ParserRegistry().find_reasoning(parser))
    parsing = Parsing(family=family, vocabulary=vocabulary, continues=continues)
    rule = Budget(7, parsing).rule(pack_ids(vocabulary.encode(prompt)))
    assert rule.is_open == (spent is not None)
    assert rule.num_spent == len(vocabulary.encode(spent or ""))
    assert (rule.num_tokens, rule.start_ids, rule.end_ids) == (
        7,
        vocabulary.encode("<think>"),
        vocabulary.encode("</think>"),
    )


def test_a_call_ends_reasoning_where_the_parser_says_so(vocabulary: Vocabulary) -> None:
    family = Family(ParserRegistry().find_reasoning("qwen3"))
    rule = Budget(7, Parsing(family=family, vocabulary=vocabulary)).rule(b"")
    assert rule.other_ends == [vocabulary.encode("<tool_call>")]
