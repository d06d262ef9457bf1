"""mla_attention on the CPU against its reference and transformers, on scattered pages of NaN."""

from typing import Any

import pytest
import torch

from tests.ops.merged import merged
from tests.ops.scattered import BLOCKS, scattered
from tokenmesh.kernels.mla_attention import (
    TOLERANCE,
    latent_write,
    mla_attention,
    mla_attention_reference,
    prepare,
)
from tokenmesh.kernels.paged_attention import Rows

DTYPES = [torch.float32, torch.bfloat16]
RANK, ROPE, NOPE, HEADS, PAGE = 24, 8, 12, 5, 8
STARTS, LENGTHS = [2, 15, 17, 31, 0, 30], [1, 1, 1, 1, 19, 4]


def inputs(rows: Rows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A query, and pages that hold NaN but for the rows' tokens."""
    pages = torch.full((BLOCKS, PAGE, RANK + ROPE), torch.nan).to(dtype)
    for start, length, table in zip(rows.starts, rows.lengths, rows.tables, strict=True):
        position = torch.arange(start + length)
        slots = table[position // PAGE] * PAGE + position % PAGE
        latent_write(torch.randn(len(slots), RANK + ROPE).to(dtype), pages, slots)
    return torch.randn(sum(rows.lengths), HEADS, RANK + ROPE).to(dtype), pages


def chosen(rows: Rows, most: int) -> torch.Tensor:
    """[T, most] some of the positions up to each token's own, in no order; -1 where there is
    none. The first token of all sees nothing."""
    indices = torch.full((sum(rows.lengths), most), -1)
    token = 0
    for start, length in zip(rows.starts, rows.lengths, strict=True):
        for position in range(start, start + length):
            some = torch.randperm(position + 1)[:most]
            places = torch.randperm(most)[: len(some)]
            indices[token, places] = some
            token += 1
    indices[0] = -1
    return indices


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most", [None, 3, 40])
def test_attention_and_lse_equal_the_reference(most: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = scattered(STARTS, LENGTHS, PAGE)
    query, pages = inputs(rows, dtype)
    indices = None if most is None else chosen(rows, most)
    expected, expected_lse = mla_attention_reference(query, pages, rows, RANK, 0.2, indices)
    prepared = prepare(rows, pages.shape, dtype)
    lse = torch.full((len(query), HEADS), torch.nan)
    result = mla_attention(query, pages, prepared, RANK, 0.2, indices, lse)
    torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=TOLERANCE[dtype], rtol=0)
    again = mla_attention(query, pages, prepared, RANK, 0.2, indices)
    assert torch.equal(again, result)


def test_small_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("tokenmesh.kernels.paged_attention.cpu_variant.SCRATCH_BYTES", 1500)
    monkeypatch.setattr("tokenmesh.kernels.mla_attention.cpu.SCRATCH_BYTES", 1500)
    rows = scattered(STARTS, LENGTHS, PAGE)
    query, pages = inputs(rows, torch.float32)
    for indices in (None, chosen(rows, 6)):
        expected, _ = mla_attention_reference(query, pages, rows, RANK, 0.2, indices)
        prepared = prepare(rows, pages.shape, torch.float32)
        result = mla_attention(query, pages, prepared, RANK, 0.2, indices)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_all_positions_by_index_are_all_positions() -> None:
    torch.manual_seed(0)
    rows = scattered([4, 0], [1, 9], PAGE)
    query, pages = inputs(rows, torch.float32)
    indices = torch.arange(9).repeat(10, 1)
    ends = torch.tensor([4, *range(9)])
    indices[indices > ends.unsqueeze(1)] = -1
    prepared = prepare(rows, pages.shape, torch.float32)
    sparse = mla_attention(query, pages, prepared, RANK, 0.2, indices)
    torch.testing.assert_close(sparse, mla_attention(query, pages, prepared, RANK, 0.2))


def layer_of_deepseek() -> Any:
    """transformers' attention of DeepSeek V3 with random weights, in float32."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = transformers.DeepseekV3Config(
        hidden_size=48, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=20,
        kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=10,
        num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    layer = DeepseekV3Attention(config, 0).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return layer


def parts_of(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """hidden [L, 48] -> absorbed queries [L, H, RANK + ROPE], latents [L, RANK + ROPE], W_uv
    [H, 10, RANK], and transformers' own result before the output projection [L, H * 10]."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    length = len(hidden)
    rotary = deepseek.DeepseekV3RotaryEmbedding(layer.config)
    turns = rotary(hidden, torch.arange(length)[None])
    seen: dict[str, torch.Tensor] = {}
    expand = layer.expand_kv

    def expand_kv(latent: torch.Tensor, turned: torch.Tensor) -> Any:
        seen["latents"] = torch.cat([latent, turned], -1)[0, 0]
        return expand(latent, turned)

    layer.expand_kv = expand_kv
    hook = layer.o_proj.register_forward_pre_hook(lambda _, x: seen.update(out=x[0][0]))
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    layer(hidden[None], position_embeddings=turns, attention_mask=mask)
    hook.remove()
    layer.expand_kv = expand
    up = layer.kv_b_proj.weight.view(HEADS, -1, RANK)
    query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
    plain, rope = query.view(1, length, HEADS, -1).transpose(1, 2).split([NOPE, ROPE], -1)
    rope, _ = deepseek.apply_rotary_pos_emb_interleave(rope, rope, *turns)
    absorbed = torch.einsum("bhtn,hnr->thr", plain, up[:, :NOPE])
    query = torch.cat([absorbed, rope[0].transpose(0, 1)], -1)
    return query, seen["latents"], up[:, NOPE:], seen["out"]


@torch.no_grad()
def test_chunks_and_batches_equal_transformers_deepseek() -> None:
    torch.manual_seed(0)
    layer = layer_of_deepseek()
    rows = [parts_of(layer, torch.randn(length, 48)) for length in (25, 13)]
    tables = scattered([0, 0], [25, 13], PAGE).tables
    pages = torch.full((BLOCKS, PAGE, RANK + ROPE), torch.nan)
    done = [0, 0]
    for counts in ((7, 1), (7, 5), (7, 5), (1, 1), (1, 1), (1, 0), (1, 0)):
        order = sorted((n for n in (0, 1) if counts[n]), key=lambda n: counts[n] > 1)
        starts, lengths = [done[n] for n in order], [counts[n] for n in order]
        step = Rows(starts, lengths, tables[order])
        for n in order:
            position = torch.arange(done[n], done[n] + counts[n])
            slots = tables[n, position // PAGE] * PAGE + position % PAGE
            latent_write(rows[n][1][position], pages, slots)
        query = torch.cat([rows[n][0][done[n] : done[n] + counts[n]] for n in order])
        prepared = prepare(step, pages.shape, pages.dtype)
        out = mla_attention(query, pages, prepared, RANK, layer.scaling)
        token = 0
        for n in order:
            mixed = out[token : token + counts[n]].view(-1, HEADS, RANK)
            values = torch.einsum("thr,hvr->thv", mixed, rows[n][2]).flatten(1)
            expected = rows[n][3][done[n] : done[n] + counts[n]]
            torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)
            token += counts[n]
            done[n] += counts[n]
    assert done == [25, 13]


@pytest.mark.parametrize("prefix", [11, 4])
def test_latents_before_a_chunk_merge_with_those_of_the_chunk(prefix: int) -> None:
    """Expand a long chunk as a caller does: the older latents apart, then both as one."""
    torch.manual_seed(0)
    whole = scattered([prefix], [6], PAGE)
    query, pages = inputs(whole, torch.float32)
    expected, expected_lse = mla_attention_reference(query, pages, whole, RANK, 0.2)
    older = Rows([prefix - 6], [6], whole.tables, ((0, 6),))
    first_lse = torch.empty(6, HEADS)
    prepared = prepare(older, pages.shape, pages.dtype)
    first = mla_attention(query, pages, prepared, RANK, 0.2, None, first_lse)
    position = torch.arange(prefix, prefix + 6)
    own = pages[whole.tables[0, position // PAGE], position % PAGE]
    logits = torch.einsum("thr,sr->ths", query, own) * 0.2
    logits.masked_fill_(torch.ones(6, 6, dtype=torch.bool).triu(1).unsqueeze(1), -torch.inf)
    second = torch.einsum("ths,sr->thr", logits.softmax(-1), own[:, :RANK]).flatten(1)
    out, lse = merged(first, first_lse, second, logits.logsumexp(-1))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=0)
