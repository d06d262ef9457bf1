"""Where tensors and tokens are in prompts, by tokenizer_svc on the real bus."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import byte_level_bpe, sentencepiece
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.tokenizer_svc.main import build
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.model import ModelSettings, TokenizerSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.hashing import route_hashes, route_scope
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages import Describe, Described, Message
from tokenmesh.shared.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    TextPrompt,
    Tokenize,
    Tokenized,
)
from tokenmesh.shared.tokens import count_ids, pack_ids, unpack_ids

BPE, LLAMA, GUARDED = map(ModelName, ("bpe", "llama", "guarded"))
ROUTE_BLOCK = 4
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Client:
    """Asks the running tokenizer."""

    bus: MessageBus
    tokenizer: Tokenizer

    async def ask(self, message: Tokenize | Describe) -> Message:
        subject = subjects.tokenize(message.model)
        return await self.bus.request(subject, message, deadline_s=now_s() + 10)

    async def tokenize(self, prompt: object, model: ModelName = BPE, **fields: object) -> Tokenized:
        request = RequestId("r")
        message = Tokenize(request_id=request, model=model, prompt=prompt, **fields)  # type: ignore[arg-type]
        answer = await self.ask(message)
        assert isinstance(answer, Tokenized)
        return answer

    async def described(self, model: ModelName) -> Described:
        answer = await self.ask(Describe(model=model))
        assert isinstance(answer, Described)
        return answer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


def chat(content: object) -> ChatPrompt:
    return ChatPrompt(messages_json=msgspec.json.encode([{"role": "user", "content": content}]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(
    tmp_path_factory: pytest.TempPathFactory, nats_server: Server, redis_server: Server
) -> AsyncIterator[Client]:
    bpe: Path = byte_level_bpe(tmp_path_factory.mktemp("bpe"))
    llama = sentencepiece(tmp_path_factory.mktemp("llama"), "bpe")
    models = (
        ModelSettings(model=str(bpe), served_model_name=(BPE,)),
        ModelSettings(model=str(llama), served_model_name=(LLAMA,)),
        ModelSettings(
            model=str(bpe), served_model_name=(GUARDED,), allow_special_tokens_in_content=False
        ),
    )
    settings = Settings(
        models=models,
        tokenizer=TokenizerSettings(route_block_tokens=ROUTE_BLOCK),
        bus=bus_settings_of(nats_server),
        redis=redis_settings_of(redis_server),
    )
    async with running("tokenizer", settings, build):
        bus = await connect(settings.bus, "places")
        yield Client(bus, Tokenizer.from_file(str(bpe / "tokenizer.json")))
        await bus.close()


def tensor(length: int, key: str = "k") -> dict[str, object]:
    """A part of a message as a gateway makes it."""
    return {"type": "prompt_embeds", "data": f"blob:{key}", "length": length}


@pytest.mark.parametrize("model", [BPE, GUARDED])
async def test_tensors_stand_where_the_template_puts_them(client: Client, model: ModelName) -> None:
    """The texts around them are encoded as around a special token, as in vLLM."""
    content = ["a fox", tensor(3), "jumps", tensor(1, "l"), tensor(2, "m"), "\U00100000 over"]
    answer = await client.tokenize(chat(content), model)
    ids = unpack_ids(answer.token_ids)
    assert [(item.kind, item.content_hash) for item in answer.media] == [
        *(("embeds", "k"), ("embeds", "l"), ("embeds", "m"))
    ]
    pieces = ["<|im_start|>user\na fox\n", "\njumps\n", "\n", "\n\U00100000 over<|im_end|>\n"]
    wanted: list[int] = []
    for piece, item in zip(pieces, answer.media, strict=False):
        wanted += client.encode(piece)
        assert item.offset == len(wanted)
        wanted += [0] * item.length
        assert item.embeddings == item.content_hash
    wanted += client.encode(pieces[-1] + "<|im_start|>assistant\n")
    assert ids == wanted
    scope = route_scope(model, (await client.described(model)).fingerprint, ROUTE_BLOCK)
    hashes = route_hashes(answer.token_ids, ROUTE_BLOCK, scope, media=answer.media)
    assert answer.route_hashes == hashes


async def test_special_tokens_of_a_client_do_not_move_its_tensors(client: Client) -> None:
    end = client.tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    answer = await client.tokenize(chat(["<|im_end|>", tensor(2), "<|im_end|>"]))
    ids = unpack_ids(answer.token_ids)
    (item,) = answer.media
    assert ids[item.offset : item.offset + 2] == [0, 0]
    assert ids[: item.offset].count(end) == 1
    assert ids[item.offset :].count(end) == 2


async def test_a_tensor_is_not_cut_and_may_be_left_out_with_its_message(client: Client) -> None:
    behind = len(client.encode("<|im_end|>\n<|im_start|>assistant\n"))
    with pytest.raises(InvalidInput, match="cut off a part of a media item"):
        await client.tokenize(chat([tensor(9)]), truncate_prompt_tokens=behind + 8)
    answer = await client.tokenize(chat([tensor(9), "a"]), truncate_prompt_tokens=4)
    assert (count_ids(answer.token_ids), answer.media) == (4, [])
    assert (await client.tokenize(chat([tensor(500)]), max_tokens=100)).too_many > 500


async def test_what_no_gateway_has_stored_is_no_tensor(client: Client) -> None:
    for part in ({"data": "AAAA"}, {"data": "blob:k"}, {"data": "blob:k", "length": "1"}):
        with pytest.raises(InvalidInput) as caught:
            await client.tokenize(chat([{"type": "prompt_embeds", **part}]))
        assert caught.value.path == ("messages", 0, "content", 0)


@pytest.mark.parametrize("model", [BPE, LLAMA])
async def test_the_places_of_tokens_are_those_of_the_text(client: Client, model: ModelName) -> None:
    text = "The qu\u00efck \U0001f98a fox\n\n jumps " * 3000
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    prompts: list[tuple[object, str]] = [(TextPrompt(text="a fox"), "a fox")]
    if model == BPE:
        prompts += [(chat(text), rendered), (chat("a"), rendered.replace(text, "a"))]
    for prompt, whole in prompts:
        answer = await client.tokenize(prompt, model, return_offsets=True)
        assert answer.offsets is not None
        places = unpack_ids(answer.offsets)
        ids = unpack_ids(answer.token_ids)
        assert len(places) == 2 * len(ids)
        starts, ends = places[::2], places[1::2]
        strings = [whole[start:end] for start, end in zip(starts, ends, strict=True)]
        if model == BPE:
            assert ends[-1] == len(whole)
            alone = [client.encode(each) for each in strings[-3:]]
            assert [token for found in alone for token in found] == ids[-3:]
        else:
            assert places[:2] == [0, 0]
            assert strings[1].strip()
    side = {"truncate_prompt_tokens": 3, "truncation_side": "right"}
    cut = await client.tokenize(TextPrompt(text="a quick fox jumps"), BPE, **side)
    assert cut.offsets is None
    cut = await client.tokenize(
        TextPrompt(text="a quick fox jumps"), BPE, return_offsets=True, **side
    )
    assert cut.offsets is not None
    assert len(unpack_ids(cut.offsets)) == 6


async def test_prompts_of_ids_and_with_tensors_have_no_places(client: Client) -> None:
    for prompt in (IdsPrompt(token_ids=pack_ids([5, 6])), chat(["a", tensor(2)])):
        assert (await client.tokenize(prompt, return_offsets=True)).offsets is None
