"""ReasoningBudget: reasoning tokens of the prompt are counted from its markers."""

import pytest
from tokenizers import Tokenizer

from tests.fakes.tokenizers import OpenVocabulary, byte_level_bpe
from tokenmesh.services.gateway.core.generation.parsing import Parsing, ReasoningBudget
from tokenmesh.services.gateway.parsers.formats import FormatFamily
from tokenmesh.services.gateway.parsers.parser import ToolSchema
from tokenmesh.services.gateway.parsers.reasoning import REASONING
from tokenmesh.shared.tokens import pack_ids

SYSTEM_PROMPT = "Think in <think> tags.\nassistant\n"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> OpenVocabulary:
    folder = tmp_path_factory.mktemp("think")
    byte_level_bpe(folder, "<think>", "</think>")
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return OpenVocabulary.of(tokenizer, tokenizer.get_added_tokens_decoder())


@pytest.mark.parametrize(
    ("parser", "prompt", "continues", "spent"),
    [
        ("qwen3", "Hi\n<think>", False, ""),
        ("qwen3", "Hi\n<think>\n", False, "\n"),
        ("qwen3", SYSTEM_PROMPT, False, None),
        ("qwen3", f"{SYSTEM_PROMPT}<think>\n", False, "\n"),
        ("qwen3", "Hi\n<think>\n\n</think>\n\n", False, None),
        ("qwen3", "Hi\n<think>a thought", False, None),
        ("qwen3", "Hi\n<think>a thought", True, "a thought"),
        ("qwen3", "Hi\n<think>a thought</think>and", True, None),
        ("deepseek_r1", SYSTEM_PROMPT, False, ""),
        ("deepseek_r1", "Hi\n<think>\n", False, "\n"),
    ],
)
def test_reasoning_tokens_of_the_prompt_are_counted(
    vocabulary: OpenVocabulary, parser: str, prompt: str, continues: bool, spent: str | None
) -> None:
    family = FormatFamily(REASONING[parser])
    parsing = Parsing(family=family, vocabulary=vocabulary, continues=continues)
    rule = ReasoningBudget(7, parsing).rule(pack_ids(vocabulary.encode(prompt)))
    assert rule.is_open == (spent is not None)
    assert rule.num_spent == len(vocabulary.encode(spent or ""))
    assert (rule.num_tokens, rule.start_ids, rule.end_ids) == (
        7,
        vocabulary.encode("<think>"),
        vocabulary.encode("</think>"),
    )


def test_a_call_ends_reasoning_if_there_are_tools(vocabulary: OpenVocabulary) -> None:
    family = FormatFamily(REASONING["qwen3"])
    tools = (ToolSchema(name="f", parameters={}),)
    for given, others in (((), []), (tools, [vocabulary.encode("<tool_call>")])):
        rule = ReasoningBudget(7, Parsing(family=family, vocabulary=vocabulary, tools=given)).rule(
            b""
        )
        assert rule.other_ends == others


@pytest.mark.parametrize("name", sorted(REASONING))
def test_every_format_that_can_be_cut_has_few_markers(
    name: str, vocabulary: OpenVocabulary
) -> None:
    """The limits of worker_svc/admission.py."""
    family = FormatFamily(REASONING[name])
    assert family.can_cut_reasoning == (name != "openai_gptoss")
    _, ends = Parsing(
        family=family, vocabulary=vocabulary, tools=(ToolSchema(name="f", parameters={}),)
    ).reasoning_markers()
    assert 1 <= len(ends) <= 5
    assert not family.can_cut_reasoning or max(map(len, ends)) <= 32
