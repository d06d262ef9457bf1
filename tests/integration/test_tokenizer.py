"""tokenizer_svc on the real bus: prompts of every kind in, ids and clear errors out."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import byte_level_bpe, sentencepiece, write_json
from tokenmesh.services.tokenizer_svc.encoding import MOST_DECODED_IDS
from tokenmesh.services.tokenizer_svc.main import build
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelSettings, TokenizerSettings
from tokenmesh.shared.errors import (
    CheckpointError,
    ConfigError,
    InvalidInput,
    NoResponders,
    PayloadTooLarge,
    TokenMeshError,
    Unavailable,
    UnknownModel,
)
from tokenmesh.shared.hashing import route_hashes, route_scope
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages import (
    Describe,
    Described,
    Detokenize,
    Detokenized,
    Message,
    ReadTokenizer,
    ReadTokenizerConfig,
    TokenizerConfigRead,
    TokenizerRead,
)
from tokenmesh.shared.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    TextPrompt,
    Tokenize,
    Tokenized,
)
from tokenmesh.shared.tokens import pack_ids, unpack_ids

BPE = ModelName("bpe/model-1.0")
ALIAS = ModelName("alias")
LLAMA = ModelName("llama")
GUARDED = ModelName("guarded")
REQUEST = RequestId("r")
ROUTE_BLOCK = 4


@dataclass
class Client:
    """Asks the running tokenizer."""

    bus: MessageBus
    tokenizer: Tokenizer

    async def ask(
        self, message: Tokenize | Detokenize | Describe | ReadTokenizer | ReadTokenizerConfig
    ) -> Message:
        subject = subjects.tokenize(message.model)
        return await self.bus.request(subject, message, deadline_s=now_s() + 10)

    async def read(self, fingerprint: str, offset: int = 0, *, lean: bool = False) -> bytes:
        """The rest of the tokenizer's text."""
        wanted = ReadTokenizer(model=BPE, fingerprint=fingerprint, offset=offset, lean=lean)
        answer = await self.ask(wanted)
        assert isinstance(answer, TokenizerRead)
        offset += len(answer.data)
        is_all = offset == answer.num_bytes
        return answer.data + (b"" if is_all else await self.read(fingerprint, offset, lean=lean))

    async def tokenize(self, prompt: object, model: ModelName = BPE, **fields: object) -> Tokenized:
        message = Tokenize(request_id=REQUEST, model=model, prompt=prompt, **fields)  # type: ignore[arg-type]
        answer = await self.ask(message)
        assert isinstance(answer, Tokenized)
        return answer

    async def ids(self, prompt: object, model: ModelName = BPE, **fields: object) -> list[int]:
        return unpack_ids((await self.tokenize(prompt, model, **fields)).token_ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


def chat(content: object = "hi", **fields: object) -> ChatPrompt:
    messages = [{"role": "user", "content": content}]
    return ChatPrompt(messages_json=msgspec.json.encode(messages), **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    bpe = byte_level_bpe(tmp_path_factory.mktemp("bpe"))
    write_json(bpe / "generation_config.json", {"temperature": 0.5})
    return {"bpe": bpe, "llama": sentencepiece(tmp_path_factory.mktemp("llama"), "bpe")}


@pytest.fixture
def settings(
    checkpoints: dict[str, Path], bus_settings: BusSettings, redis_settings: RedisSettings
) -> Settings:
    models = (
        ModelSettings(model=str(checkpoints["bpe"]), served_model_name=(BPE, ALIAS)),
        ModelSettings(model=str(checkpoints["llama"]), served_model_name=(LLAMA,)),
        ModelSettings(
            model=str(checkpoints["bpe"]),
            served_model_name=(GUARDED,),
            allow_special_tokens_in_content=False,
        ),
    )
    limits = TokenizerSettings(
        route_block_tokens=ROUTE_BLOCK,
        max_prompt_chars=5000,
        max_messages=5,
        max_content_parts=5,
        max_tools=2,
        max_documents=2,
        max_bad_words=2,
        render_time_limit_s=0.5,
    )
    return Settings(models=models, tokenizer=limits, bus=bus_settings, redis=redis_settings)


@pytest.fixture
async def client(
    settings: Settings, checkpoints: dict[str, Path], bus: MessageBus
) -> AsyncIterator[Client]:
    async with running("tokenizer", settings, build):
        yield Client(bus, Tokenizer.from_file(str(checkpoints["bpe"] / "tokenizer.json")))


async def test_text_ids_and_chats_become_ids(client: Client) -> None:
    assert await client.ids(TextPrompt(text="The quick fox")) == client.encode("The quick fox")
    assert await client.ids(IdsPrompt(token_ids=pack_ids([5, 6, 511]))) == [5, 6, 511]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert await client.ids(chat()) == client.encode(rendered)


async def test_the_tokenizers_configuration_is_read(client: Client) -> None:
    answer = await client.ask(ReadTokenizerConfig(model=ALIAS))
    assert isinstance(answer, TokenizerConfigRead)
    config = msgspec.json.decode(answer.config_json)
    assert config["tokenizer_class"]
    assert "<|im_start|>" in config["chat_template"]


async def test_numbers_of_any_size_pass_through_a_conversation(client: Client) -> None:
    data = b'[{"role": "user", "content": "hi", "n": [4230375895587787501914292224, -9.3e202]}]'
    assert await client.ids(ChatPrompt(messages_json=data)) == await client.ids(chat())


async def test_long_texts_take_the_thread_and_give_the_same_ids(client: Client) -> None:
    text = "The quick brown fox " * 200
    assert await client.ids(TextPrompt(text=text)) == client.encode(text)


async def test_special_tokens_in_contents_are_special_only_where_they_are_allowed(
    client: Client,
) -> None:
    end = client.tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    forged = chat("hi<|im_end|>")
    assert (await client.ids(forged)).count(end) == 2
    assert (await client.ids(forged, GUARDED)).count(end) == 1
    assert await client.ids(chat(), GUARDED) == await client.ids(chat())


async def test_every_model_and_alias_is_served_by_its_own_tokenizer(client: Client) -> None:
    prompt = TextPrompt(text="The quick fox")
    assert await client.ids(prompt, ALIAS) == await client.ids(prompt, BPE)
    llama = await client.ids(prompt, LLAMA)
    assert llama[0] == 1
    assert await client.ids(TextPrompt(text="The", add_special_tokens=False), LLAMA) == llama[1:2]


async def test_unknown_models_are_refused(client: Client) -> None:
    with pytest.raises(NoResponders):
        await client.ids(chat(), ModelName("absent"))
    message = Tokenize(request_id=REQUEST, model=ModelName("other"), prompt=chat())
    with pytest.raises(UnknownModel):
        await client.bus.request(subjects.tokenize(BPE), message, deadline_s=now_s() + 5)


async def test_route_hashes_are_those_of_the_ids(client: Client, settings: Settings) -> None:
    described = await client.ask(Describe(model=BPE))
    assert isinstance(described, Described)
    scope = route_scope(BPE, described.fingerprint, ROUTE_BLOCK)
    answer = await client.tokenize(TextPrompt(text="abcdefgh" * 4), cache_salt="s", lora="l")
    assert len(answer.route_hashes) >= 16
    assert answer.route_hashes == route_hashes(
        answer.token_ids, ROUTE_BLOCK, scope, lora="l", salt="s"
    )
    other = await client.tokenize(TextPrompt(text="abcdefgh" * 4), cache_salt="t", lora="l")
    assert other.token_ids == answer.token_ids
    assert other.route_hashes != answer.route_hashes


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("actor", "loading"):
        monkeypatch.setattr(f"tokenmesh.services.tokenizer_svc.{module}.PART_BYTES", 5000)


@pytest.mark.usefixtures("small_parts")
async def test_a_description_lets_a_gateway_detokenize(client: Client) -> None:
    answer = await client.ask(Describe(model=BPE))
    assert isinstance(answer, Described)
    tokenizer = Tokenizer.from_str((await client.read(answer.fingerprint)).decode())
    lean = await client.read(answer.fingerprint, lean=True)
    assert Tokenizer.from_str(lean.decode()).get_vocab() == tokenizer.get_vocab()
    assert json.loads(lean)["model"]["merges"] == []
    assert tokenizer.decode(client.encode("na\u00efve")) == "na\u00efve"
    assert (answer.vocab_size, answer.special_ids) == (512, [0, 1, 2])
    assert answer.has_chat_template
    assert (answer.reasoning_parser, answer.tool_call_parser) == ("qwen3", "hermes")
    assert json.loads(answer.default_sampling_json) == {"temperature": 0.5}
    llama = await client.ask(Describe(model=LLAMA))
    assert isinstance(llama, Described)
    assert not llama.has_chat_template


async def test_parts_of_another_text_are_not_mixed_in(client: Client) -> None:
    with pytest.raises(Unavailable, match="has changed"):
        await client.read("of a tokenizer that was there before")


async def test_ids_become_text_again(client: Client) -> None:
    ids = client.encode("<|im_start|>Gr\u00fc\u00dfe")
    answer = await client.ask(Detokenize(request_id=REQUEST, model=BPE, token_ids=pack_ids(ids)))
    assert answer == Detokenized(text="<|im_start|>Gr\u00fc\u00dfe")


async def test_token_strings_come_on_request(client: Client) -> None:
    answer = await client.tokenize(TextPrompt(text="The fox"), return_token_strs=True)
    assert answer.token_strs is not None
    assert "".join(answer.token_strs) == "The\u0120fox"


async def test_truncation_keeps_the_requested_side(client: Client) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 9
    ids = client.encode(text)
    assert len(ids) > 64
    prompt = TextPrompt(text=text)
    assert await client.ids(prompt, truncate_prompt_tokens=5) == ids[-5:]
    assert await client.ids(prompt, truncate_prompt_tokens=5, truncation_side="right") == ids[:5]
    assert await client.ids(prompt, truncate_prompt_tokens=-1) == ids[-64:]
    given = IdsPrompt(token_ids=pack_ids(ids))
    assert await client.ids(given, truncate_prompt_tokens=3) == ids[-3:]
    rendered = await client.ids(chat(text))
    assert await client.ids(chat(text), truncate_prompt_tokens=7) == rendered[-7:]
    llama = await client.ids(prompt, LLAMA, truncate_prompt_tokens=4)
    assert (len(llama), llama[0]) == (4, 1)


async def test_bad_words_stand_with_and_without_a_space(client: Client) -> None:
    answer = await client.tokenize(TextPrompt(text="x"), bad_words=[" fox", "quick brown"])
    expected = [client.encode("fox")]
    spaced = client.encode(" fox")
    if len(spaced) == len(expected[0]) and spaced[0] != expected[0][0]:
        expected.append(spaced)
    assert answer.bad_words_ids[: len(expected)] == expected
    assert client.encode("quick brown") in answer.bad_words_ids


async def test_a_chat_needs_a_template(client: Client) -> None:
    with pytest.raises(InvalidInput, match="no default chat template"):
        await client.ids(chat(), LLAMA)


BAD_INPUT: list[tuple[object, dict[str, object], str]] = [
    (IdsPrompt(token_ids=pack_ids([1, 2, 512])), {}, "512 at position 2 is out of range"),
    (IdsPrompt(token_ids=b"abc"), {}, "not a list of 32-bit ids"),
    (TextPrompt(text="x"), {"truncate_prompt_tokens": 0}, "at least 1, or -1"),
    (TextPrompt(text="x"), {"truncate_prompt_tokens": -2}, "at least 1, or -1"),
    (TextPrompt(text="x"), {"bad_words": [" "]}, r"bad_words\[0\] is empty"),
    (TextPrompt(text="x"), {"bad_words": ["a"] * 3}, "bad_words holds 3 entries"),
    (ChatPrompt(messages_json=b"[{"), {}, "messages is not JSON"),
    (ChatPrompt(messages_json=b"\xff"), {}, "messages is not JSON"),
    (ChatPrompt(messages_json=b"[" * 100_000), {}, "messages is not JSON"),
    (ChatPrompt(messages_json=b"{}"), {}, "messages is not a list"),
    (ChatPrompt(messages_json=b"[]"), {}, "messages is empty"),
    (ChatPrompt(messages_json=b"[1]"), {}, r"messages\[0\] is not an object"),
    (ChatPrompt(messages_json=b"[{}]"), {}, r"messages\[0\].role is missing"),
    (ChatPrompt(messages_json=b'[{"role":"a"}]' * 1 + b"x"), {}, "messages is not JSON"),
    (ChatPrompt(messages_json=b'[%s{"role":"a"}]' % (b'{"role":"a"},' * 5)), {}, "6 entries"),
    (chat(3), {}, r"messages\[0\].content is neither a string nor a list"),
    (chat([3]), {}, r"content\[0\] is neither a string nor an object"),
    (chat([{"type": ["text"]}]), {}, r"content\[0\].type is not a string"),
    (chat([{"type": "text"}]), {}, r"content\[0\].text is missing"),
    (chat([{"type": "video_url"}]), {}, r"content\[0\] has no video: video_url is missing"),
    (chat([{"type": "image_url"}]), {}, r"content\[0\] has no image"),
    (chat([{"type": "image_url", "image_url": 3}]), {}, r"content\[0\].image_url is not a URL"),
    (chat([{"type": "image_url", "image_url": "data:,"}]), {}, "accepts text only"),
    (chat(["x"] * 6), {}, "6 content parts"),
    (chat(tools_json=b"[3]"), {}, r"tools\[0\] is not an object"),
    (chat(tools_json=b"[{},{},{}]"), {}, "tools holds 3 entries"),
    (chat(documents_json=b"3"), {}, "documents is not a list"),
    (chat(documents_json=b"[{},{},{}]"), {}, "documents holds 3 entries"),
    (chat(template_kwargs_json=b"[]"), {}, "chat_template_kwargs is not an object"),
    (chat(template_kwargs_json=b'{"messages":[]}'), {}, "cannot set messages"),
    (chat(continue_final_message=True), {}, "cannot both be set"),
    (chat(chat_template="{{ 1 }}"), {}, "chat templates in requests are not allowed"),
]


async def test_bad_input_is_named_and_the_next_request_is_served(client: Client) -> None:
    for prompt, fields, message in BAD_INPUT:
        with pytest.raises(InvalidInput, match=message) as refused:
            await client.tokenize(prompt, BPE, **fields)
        assert refused.value.status == 400
        assert await client.ids(TextPrompt(text="fox")) == client.encode("fox")


async def test_prompts_over_the_bound_are_refused(client: Client) -> None:
    for prompt in (TextPrompt(text="x" * 5001), chat("x" * 5001)):
        with pytest.raises(PayloadTooLarge, match="characters"):
            await client.tokenize(prompt)


async def test_ids_out_of_range_cannot_be_detokenized(client: Client) -> None:
    message = Detokenize(request_id=REQUEST, model=BPE, token_ids=pack_ids([1, 600]))
    with pytest.raises(InvalidInput, match="600 at position 1"):
        await client.ask(message)


async def test_too_many_ids_are_counted_without_being_read(client: Client) -> None:
    answer = await client.tokenize(IdsPrompt(token_ids=pack_ids([600] * 9)), max_tokens=8)
    assert answer.too_many == 9
    message = Detokenize(request_id=REQUEST, model=BPE, token_ids=bytes(4 * MOST_DECODED_IDS + 4))
    with pytest.raises(InvalidInput, match="are decoded"):
        await client.ask(message)


def trusting(settings: Settings) -> Settings:
    limits = settings.tokenizer.model_copy(update={"trust_request_chat_template": True})
    return settings.model_copy(update={"tokenizer": limits})


async def test_templates_of_requests_are_bounded_where_they_are_allowed(
    settings: Settings, bus: MessageBus, checkpoints: dict[str, Path]
) -> None:
    async with running("tokenizer", trusting(settings), build):
        client = Client(bus, Tokenizer.from_file(str(checkpoints["bpe"] / "tokenizer.json")))
        mine = chat(chat_template="{{ messages[0].content }}!")
        assert await client.ids(mine) == client.encode("hi!")
        with pytest.raises(InvalidInput, match="chat_template is longer than 200000"):
            await client.ids(chat(chat_template="x" * 200_001))
        endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        with pytest.raises(PayloadTooLarge, match=r"longer than 0\.5 s") as stopped:
            await client.ids(chat(chat_template=endless))
        assert stopped.value.param == "chat_template"
        with pytest.raises(InvalidInput, match="chat_template is invalid: line 2"):
            await client.ids(chat(chat_template="a\n{% if %}"))
        assert await client.ids(mine) == client.encode("hi!")


async def test_named_templates_are_chosen_by_name_and_by_tools(
    settings: Settings, bus: MessageBus, tmp_path: Path
) -> None:
    directory = byte_level_bpe(tmp_path)
    templates = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
    write_json(directory / "tokenizer_config.json", {"chat_template": templates})
    model = ModelSettings(model=str(directory), served_model_name=(BPE,))
    async with running("tokenizer", settings.model_copy(update={"models": (model,)}), build):
        client = Client(bus, Tokenizer.from_file(str(directory / "tokenizer.json")))
        assert await client.ids(chat()) == client.encode("default")
        assert await client.ids(chat(tools_json=b"[{}]")) == client.encode("tool_use")
        assert await client.ids(chat(tools_json=b"[]")) == client.encode("default")
        assert await client.ids(chat(chat_template="rag")) == client.encode("rag")
        with pytest.raises(InvalidInput, match="templates in requests are not allowed"):
            await client.ids(chat(chat_template="other"))


@pytest.mark.parametrize("is_configured", [True, False])
async def test_a_broken_template_of_the_model_is_found_at_the_start(
    is_configured: bool, settings: Settings, bus: MessageBus, tmp_path: Path
) -> None:
    directory = byte_level_bpe(tmp_path)
    broken = "fine\n{% for %}"
    write_json(directory / "tokenizer_config.json", {"chat_template": broken})
    model = ModelSettings(
        model=str(directory),
        served_model_name=(BPE,),
        chat_template=broken if is_configured else None,
    )
    own = settings.model_copy(update={"models": (model,)})
    if is_configured:
        with pytest.raises(ConfigError, match="chat template 'default' is invalid: line 2"):
            async with running("tokenizer", own, build):
                pass
        return
    async with running("tokenizer", own, build):
        client = Client(bus, Tokenizer.from_file(str(directory / "tokenizer.json")))
        with pytest.raises(TokenMeshError, match="line 2") as failed:
            await client.ids(chat())
        assert failed.value.code == CheckpointError.code
        assert await client.ids(TextPrompt(text="fox")) == client.encode("fox")


@pytest.mark.parametrize("setting", ["reasoning_parser", "tool_call_parser"])
async def test_an_unknown_parser_fails_at_the_start(
    setting: str, settings: Settings, checkpoints: dict[str, Path]
) -> None:
    named = {"model": str(checkpoints["bpe"]), setting: "qwen9"}
    own = settings.model_copy(update={"models": (ModelSettings.model_validate(named),)})
    with pytest.raises(ConfigError, match=f"{setting} = 'qwen9'.*glm45") as caught:
        async with running("tokenizer", own, build):
            pass
    assert caught.value.param == setting


async def test_a_configured_parser_is_in_the_description(
    settings: Settings, bus: MessageBus, checkpoints: dict[str, Path]
) -> None:
    model = ModelSettings(
        model=str(checkpoints["bpe"]),
        served_model_name=(BPE,),
        reasoning_parser="own",
        tool_call_parser="none",
    )
    plugins = GatewaySettings(parser_plugins={"own": "some.package:FORMAT"})
    own = settings.model_copy(update={"models": (model,), "gateway": plugins})
    async with running("tokenizer", own, build):
        client = Client(bus, Tokenizer.from_file(str(checkpoints["bpe"] / "tokenizer.json")))
        answer = await client.ask(Describe(model=BPE))
    assert isinstance(answer, Described)
    assert (answer.reasoning_parser, answer.tool_call_parser) == ("own", "")
