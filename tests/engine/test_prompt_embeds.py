"""A prompt of embeddings: that of a prompt's own embeddings is answered like the prompt."""

from dataclasses import replace

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.layers.step import Patch
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.native.build_decoder import build_decoder
from tokenmesh.engine.models.native.read_config import read_facts
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import EMBEDS, MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob


def embeds_job(tiny: Tiny, name: str, prompt: list[int], num_tokens: int) -> Job:
    with torch.no_grad():
        table = tiny(name).make_oracle().get_input_embeddings().weight
    values = table[prompt].detach().float().contiguous()
    item = MediaItem(
        kind=EMBEDS, content_hash="e", offset=0, length=len(prompt), pixels=BlobKey("e")
    )
    blob = TensorBlob("float32", tuple(values.shape), values.numpy().tobytes())
    placeholders = [0] * len(prompt)
    return Job(placeholders, greedy(num_tokens), media=[item], embeddings={"e": blob})


@pytest.mark.parametrize("multiplies", [True, False])
def test_the_multiplier_counts_for_patches_only_where_the_family_says_so(
    tiny: Tiny, multiplies: bool
) -> None:
    directory = tiny("granite").directory
    facts = read_facts(read_json(directory / "config.json"))
    config = replace(facts.config, multiplies_patches=multiplies)
    facts = replace(facts, config=config)
    decoder = build_decoder(facts, Checkpoint(directory), torch.float32, lambda done, total: None)
    patch = torch.ones(2, config.hidden_size)
    hidden = decoder.embed(torch.tensor([5, 6, 7]), [Patch(slice(1, 3), patch)])
    factor = config.embedding_multiplier
    assert factor == 3.0
    assert isinstance(decoder.embedding, torch.Tensor)
    assert torch.equal(hidden[0], decoder.embedding[5] * factor)
    assert torch.equal(hidden[1:], patch * (factor if multiplies else 1.0))


@pytest.mark.parametrize("chunk", [5, 1024])
@pytest.mark.parametrize("name", ["llama", "qwen3", "granite"])
def test_the_answer_is_that_of_the_tokens(tiny: Tiny, name: str, chunk: int) -> None:
    prompt = prompt_of(37)
    driver = EngineDriver(tiny(name).directory, max_num_batched_tokens=chunk)
    expected = tiny(name).greedy([prompt], 16)
    assert driver.tokens([embeds_job(tiny, name, prompt, 16)]) == expected
    again = driver.run([embeds_job(tiny, name, prompt, 16)])[0]
    assert [again.token_ids] == expected
    assert again.num_cached > 0


@pytest.mark.parametrize("chunk", [5, 1024])
def test_tensors_between_tokens_answer_like_their_tokens(tiny: Tiny, chunk: int) -> None:
    prompt = prompt_of(37)
    driver = EngineDriver(tiny("qwen3").directory, max_num_batched_tokens=chunk)
    with torch.no_grad():
        table = tiny("qwen3").make_oracle().get_input_embeddings().weight.detach().float()
    ids, media, embeddings = [*prompt], [], {}
    for key, start, end in (("a", 3, 4), ("b", 9, 25), ("c", 25, 28)):
        values = table[prompt[start:end]].contiguous()
        ids[start:end] = [0] * (end - start)
        blob = TensorBlob("float32", tuple(values.shape), values.numpy().tobytes())
        item = MediaItem(
            kind=EMBEDS, content_hash=key, offset=start, length=end - start, pixels=BlobKey(key)
        )
        media.append(item)
        embeddings[key] = blob
    job = Job(ids, greedy(16), media=media, embeddings=embeddings)
    assert driver.tokens([job]) == tiny("qwen3").greedy([prompt], 16)
