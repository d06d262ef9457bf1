"""A factor is not lost that transformers applies only to embeddings which it makes from ids."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch

from tests.engine.test_general_kind import PAGE, PROMPTS, check_greedy, jobs_of
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.general_models import FALCON_H1_MULTIPLIERS
from tests.fakes.models import Fake, make_fake
from tests.fakes.tiny import TinyCheckpoint, prompt_of
from tests.fakes.transformers_embeddings import expressions_for_ids_alone
from tests.rounds import some
from tokenmesh.engine.models.tree.embedding_factor import embedding_factor
from tokenmesh.engine.models.tree.model import HfModel
from tokenmesh.engine.models.tree.run import UnservedModel

FALCONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "0.5B": {"num_attention_heads": 8, "mamba_n_heads": 24, "mamba_d_state": 16},
    "1.5B": {"num_attention_heads": 8, "mamba_n_heads": 48, "mamba_d_state": 32},
    "1.5B-deep": {
        "num_attention_heads": 6,
        "mamba_n_heads": 24,
        "mamba_d_state": 32,
        "num_hidden_layers": 6,
    },
    "3B": {"num_attention_heads": 10, "mamba_n_heads": 32, "mamba_d_state": 32},
    "7B": {"num_attention_heads": 12, "mamba_n_heads": 24, "mamba_d_state": 32},
    "34B": {
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "mamba_n_heads": 32,
        "mamba_d_state": 32,
        "mamba_n_groups": 2,
    },
}
"""Heads and states of the published sizes, whose heads of Mamba are as wide as those of attention
or half as wide, and whose states are an eighth here."""


def falcon_of(name: str) -> Fake:
    sizes = FALCONS[name]
    width = 16 if name in ("3B", "7B", "34B") else 8
    return Fake(
        "FalconH1",
        {
            "head_dim": 8 if name == "0.5B" else 16,
            "num_key_value_heads": 2,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_d_head": width,
            "mamba_d_ssm": width * sizes["mamba_n_heads"],
            "mamba_chunk_size": 16,
            "mamba_rms_norm": name == "34B",
            "mamba_norm_before_gate": False,
            "projectors_bias": False,
            **FALCON_H1_MULTIPLIERS,
            "attention_in_multiplier": 1.0,
            "lm_head_multiplier": 0.0390625 if name.startswith(("0", "1")) else 0.01953125,
            **sizes,
        },
        {"rope_type": "default", "rope_theta": 100000000000.0},
    )


@some(FALCONS, ("0.5B", "34B"))
def test_falcon_h1_of_each_size_is_exact(tmp_path: Path, name: str) -> None:
    """In chunks and batches, preempted, and on blocks of an earlier prompt."""
    fake = falcon_of(name)
    make_fake(fake).save_pretrained(tmp_path)
    checkpoint = TinyCheckpoint(tmp_path, lambda: make_fake(fake))
    driver = EngineDriver(
        tmp_path,
        model_impl="transformers",
        max_num_seqs=9,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=23,
        mamba_block_size=PAGE,
    )
    outcomes = driver.again(num_blocks=20).run(jobs_of(PROMPTS))
    check_greedy(checkpoint, PROMPTS, outcomes)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 0
    first, shared = driver.run(jobs_of(PROMPTS[:1])), driver.run(jobs_of(PROMPTS[1:2]))
    check_greedy(checkpoint, PROMPTS[:2], [*first, *shared])
    assert shared[0].num_cached == 2 * PAGE
    (expected,) = checkpoint.greedy([PROMPTS[0]], len(first[0].token_ids))
    assert first[0].token_ids == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_factor_is_the_number_of_the_config_in_each_dtype(dtype: str) -> None:
    model = make_fake(falcon_of("0.5B")).to(getattr(torch, dtype))
    found = embedding_factor(model, torch.tensor(prompt_of(14)))
    assert found == FALCON_H1_MULTIPLIERS["embedding_multiplier"]


def test_a_tree_that_multiplies_whatever_it_is_given_has_no_factor() -> None:
    model = make_fake(Fake("Granite", {"embedding_multiplier": 3.0}))
    assert embedding_factor(model, torch.tensor(prompt_of(14))) == 1.0


class AddsByIds(torch.nn.Module):
    """A tree whose first layer is given a little more for ids than for their embeddings."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 8, dtype=dtype)
        self.layers = torch.nn.ModuleList([torch.nn.Identity()])
        text = SimpleNamespace(hidden_size=8, is_encoder_decoder=False)
        self.config = text
        text.get_text_config = lambda: text
        self.dtype = dtype

    @property
    def base_model(self) -> torch.nn.Module:
        return self

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.table

    def forward(self, use_cache: bool, **given: torch.Tensor) -> Any:
        hidden = given.get("inputs_embeds")
        if hidden is None:
            hidden = self.table(given["input_ids"]) + given["input_ids"][..., None] * 1e-2
        return SimpleNamespace(logits=self.layers[0](hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tree_that_adds_something_by_ids_is_refused_by_name(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = cast("Any", AddsByIds(dtype))
    with pytest.raises(UnservedModel, match="needs token ids in addition to their embeddings"):
        embedding_factor(model, torch.tensor(prompt_of(14)) % 50)


def test_embeddings_are_those_that_transformers_gives_to_its_first_layer(tmp_path: Path) -> None:
    fake = falcon_of("1.5B")
    make_fake(fake).save_pretrained(tmp_path)
    model: Any = EngineDriver(tmp_path, dtype="bfloat16").model.resident._model
    assert isinstance(model, HfModel)
    oracle, seen = make_fake(fake).bfloat16(), []
    oracle.model.layers[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    ids = torch.tensor(prompt_of(20))
    with torch.inference_mode():
        oracle(ids[None])
        assert torch.equal(model.embed(ids), seen[0][0])


APPLIED: Final = {"self.embed_tokens(input_ids) * self.embedding_multiplier": {"falcon_h1"}}
SEQUENCES_TO_SEQUENCES: Final = {
    "self.embed_tokens(input_ids) * self.embed_scale": {
        *("blenderbot_small", "fsmt", "marian", "mvp", "pegasus", "speech_to_text"),
    },
}
"""Encoders and decoders that are not served; their decoders alone have no cache, or none is made.
`embedding_factor` would find the number."""
OTHERS: Final = {
    # embeddings of images and recordings, which take the places of marks
    *("audioflamingo3", "colqwen2", "fun_asr_nano", "gemma3n", "glmasr", "higgs_audio_v2"),
    *("inkling", "moss_transcribe_diarize", "musicflamingo", "nemotron3_5_transcribe"),
    *("nemotron_h_omni", "phi4_multimodal", "pi0", "qwen2_audio", "qwen3_asr"),
    *("vibevoice_asr", "voxtral", "voxtral_realtime"),
    # sums over the codebooks of audio
    *("bark", "csm", "moshi", "musicgen", "musicgen_melody", "pop2piano", "qwen2_5_omni"),
    # characters and proteins, which are encoded from ids
    *("canine", "esm"),
}
"""Model types whose code makes other embeddings there, but multiplies none by a number."""


def test_every_scaling_of_transformers_between_ids_and_embeddings_is_known() -> None:
    """A new one is tried first: see `embedding_factor`."""
    found = expressions_for_ids_alone()
    scaled = {key: types for key, types in found.items() if "*" in key}
    assert scaled == APPLIED | SEQUENCES_TO_SEQUENCES
    rest = set().union(*(types for key, types in found.items() if key not in scaled))
    assert rest == OTHERS
