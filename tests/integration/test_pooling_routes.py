"""The routes that answer with numbers, over HTTP and a real bus, with a fake worker behind them."""

import base64
import json
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy
import pytest
import pytest_asyncio

from tests.fakes.back_end import fake_tokenizer
from tests.fakes.pool_mesh import (
    CACHED,
    SIZE,
    PoolMesh,
    expected,
    pooled_of,
    post,
    refused,
    tokens,
)
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.shared.messages.pooling import PoolItem, PoolTask
from tokenmesh.shared.tokens import pack_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog, and so on and on"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(nats_server: Server, redis_server: Server) -> AsyncIterator[PoolMesh]:
    tasks: tuple[PoolTask, ...] = ("embed", "token_embed", "classify", "score")
    bus, redis = bus_settings_of(nats_server), redis_settings_of(redis_server)
    async with PoolMesh(bus, redis, *tasks) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: PoolMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as connected:
        yield connected


async def test_embeddings_of_every_kind_of_input(mesh: PoolMesh, client: httpx.AsyncClient) -> None:
    ids = tokens(TEXTS[0])
    for given, wanted in (
        (TEXTS[0], [TEXTS[0]]),
        (TEXTS, TEXTS),
        (ids, [ids]),
        ([ids, [5, 6]], [ids, [5, 6]]),
    ):
        answer = await post(client, "/v1/embeddings", model=mesh.model, input=given)
        assert answer["object"] == "list"
        assert answer["model"] == mesh.model
        assert answer["id"].startswith("embd-")
        assert [each["index"] for each in answer["data"]] == list(range(len(wanted)))
        assert [each["embedding"] for each in answer["data"]] == [expected(w) for w in wanted]
        lengths = [
            len(w) if isinstance(w, list) else len(fake_tokenizer().encode(w).ids) for w in wanted
        ]
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(lengths)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED


async def test_a_conversation_is_embedded_as_its_template_writes_it(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    text = 'user: "Hi"\nassistant: '
    answer = await post(client, "/v1/embeddings", messages=chat)
    assert answer["data"][0]["embedding"] == expected(text)
    answer = await post(client, "/v1/embeddings", messages=[chat, chat])
    assert [each["embedding"] for each in answer["data"]] == [expected(text)] * 2


async def test_embeddings_as_bytes_of_any_type(mesh: PoolMesh, client: httpx.AsyncClient) -> None:
    wanted = numpy.array(expected(TEXTS[0]), "f4")
    answer = await post(client, "/v1/embeddings", input=TEXTS[0], encoding_format="base64")
    data = base64.b64decode(answer["data"][0]["embedding"])
    assert numpy.frombuffer(data, "<f4").tolist() == wanted.tolist()
    for dtype, order, endianness in (("f2", ">", "big"), ("f2", "<", "native"), ("f4", ">", "big")):
        answer = await post(
            client,
            "/v1/embeddings",
            input=TEXTS[0],
            encoding_format="base64",
            embed_dtype="float16" if dtype == "f2" else "float32",
            endianness=endianness,
        )
        data = base64.b64decode(answer["data"][0]["embedding"])
        assert data == wanted.astype(order + dtype).tobytes()
    body = {"input": TEXTS, "encoding_format": "bytes", "embed_dtype": "float16"}
    response = await client.post("/v1/embeddings", json=body)
    assert response.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(response.headers["metadata"])
    for text, facts in zip(TEXTS, metadata["data"], strict=True):
        part = response.content[facts["start"] : facts["end"]]
        assert part == numpy.array(expected(text), "f4").astype("<f2").tobytes()
        assert facts["shape"] == [SIZE]
    assert metadata["usage"]["prompt_tokens"] > 0
    response = await client.post("/v1/embeddings", json={**body, "encoding_format": "bytes_only"})
    assert "metadata" not in response.headers
    assert len(response.content) == 2 * SIZE * len(TEXTS)


async def test_dimensions_reach_the_worker(mesh: PoolMesh, client: httpx.AsyncClient) -> None:
    answer = await post(client, "/v1/embeddings", input="Hi", dimensions=4)
    assert answer["data"][0]["embedding"] == expected("Hi", dims=4)
    status, error = await refused(client, "/v1/embeddings", input="Hi", dimensions=SIZE + 1)
    assert (status, error["param"]) == (400, "dimensions")
    cohere = {"texts": ["Hi"], "input_type": "search_query", "output_dimension": SIZE + 1}
    status, error = await refused(client, "/v2/embed", **cohere)
    assert (status, error["param"]) == (400, "output_dimension")
    assert error["message"].startswith("output_dimension is ")


async def test_truncation_of_either_end(mesh: PoolMesh, client: httpx.AsyncClient) -> None:
    ids = tokens(TEXTS[2])
    for side, kept in (("left", ids[-3:]), ("right", ids[:3]), (None, ids[:3])):
        fields = {} if side is None else {"truncation_side": side}
        for given in (TEXTS[2], ids):
            answer = await post(
                client, "/v1/embeddings", input=given, truncate_prompt_tokens=3, **fields
            )
            assert answer["data"][0]["embedding"] == expected(kept)


async def test_a_text_that_is_too_long_is_named(mesh: PoolMesh, client: httpx.AsyncClient) -> None:
    long = "word " * 400
    status, error = await refused(client, "/v1/embeddings", input=["a", long])
    assert (status, error["param"], error["code"]) == (400, "input[1]", "context_length_exceeded")
    assert "maximum context length is 256 tokens" in error["message"]
    status, error = await refused(client, "/v1/embeddings", input=[[1], [1] * 300])
    assert (status, error["param"], error["code"]) == (400, "input[1]", "context_length_exceeded")
    status, error = await refused(client, "/rerank", query="a", documents=["b", long])
    assert (status, error["param"]) == (400, "documents[1]")
    answer = await post(client, "/v1/embeddings", input=["a", long], truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 257


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": "a", "messages": [{"role": "user"}]}, "input"),
    ("/v1/embeddings", {"input": [[]]}, "input[0]"),
    ("/v1/embeddings", {"input": [70000]}, "input"),
    ("/v1/embeddings", {"input": [-1]}, "input[0]"),
    ("/v1/embeddings", {"input": [1, "a"]}, "input[1]"),
    ("/v1/embeddings", {"input": [""]}, "input[0]"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "padding": "max_length"}, "padding"),
    ("/v1/embeddings", {"input": "a", "normalize": False, "use_activation": True}, "normalize"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 300}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/pooling", {"input": "a", "task": "plugin"}, "task"),
    ("/pooling", {"input": "a", "task": "score"}, "task"),
    ("/pooling", {"input": "a", "task": "token_classify"}, "model"),
    ("/score", {"text_1": "a"}, "text_2"),
    ("/score", {}, "text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
    ("/score", {"queries": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "a"}, "documents"),
    ("/rerank", {"query": "a", "documents": [{"title": "x"}]}, "documents[0]"),
    (
        "/rerank",
        {"query": "a", "documents": [{"content": [{"type": "image_url"}]}]},
        "documents[0]",
    ),
    ("/v2/embed", {"texts": ["a"], "images": ["data:"]}, "texts"),
    ("/v2/embed", {"input_type": "classification"}, "texts"),
    ("/v2/embed", {"texts": ["a"], "input_type": "other"}, "input_type"),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types[0]"),
    ("/v2/embed", {"texts": ["a", "word " * 400], "truncate": "NONE"}, "texts[1]"),
]


async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient,
) -> None:
    for path, body, param in WRONG:
        status, error = await refused(client, path, **body)
        assert (status, error["param"]) == (400, param), error


async def test_a_wrong_id_is_named_alone(client: httpx.AsyncClient) -> None:
    """Whatever else may stand in its field."""
    for given, message in (
        ([-1], "input[0]: Input should be greater than or equal to 0 (got -1)"),
        ([1, -1], "input[1]: Input should be greater than or equal to 0 (got -1)"),
        ([[1], [2, -1]], "input[1][1]: Input should be greater than or equal to 0 (got -1)"),
        ([2**32], "input[0]: Input should be less than 4294967296 (got 4294967296)"),
        ([1, "a"], "input[1]: Input should be a valid integer (got 'a')"),
        (["a", -1], "input[1]: Input should be a valid string (got -1)"),
        ([[1], -1], "input[1]: Input should be a valid array (got -1)"),
    ):
        _, error = await refused(client, "/pooling", input=given)
        assert error["message"].partition(" [type=")[0] == message
        assert error["message"].count("Input should") == 1


async def test_pooling_gives_the_numbers_of_each_token(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    answer = await post(client, "/pooling", input=TEXTS, task="token_embed")
    assert [each["data"] for each in answer["data"]] == [expected(t, "token_embed") for t in TEXTS]
    assert {each["object"] for each in answer["data"]} == {"pooling"}
    for fields in ({"task": "embed"}, {}):
        answer = await post(client, "/pooling", input=TEXTS[0], **fields)
        assert answer["data"][0]["data"] == expected(TEXTS[0])
    body = {"input": TEXTS[0], "task": "token_embed", "encoding_format": "base64"}
    answer = await post(client, "/pooling", **body)
    data = base64.b64decode(answer["data"][0]["data"])
    wanted = numpy.array(expected(TEXTS[0], "token_embed"), "f4")
    assert data == wanted.tobytes()


def pair_score(first: str, second: str) -> float:
    """The fake worker's score of a pair, with type ids as the tokenizer has them."""
    tokenizer = fake_tokenizer()
    one, two = tokenizer.encode(first).ids, tokenizer.encode(second).ids
    types = bytes([0] * len(one) + [1] * len(two))
    item = PoolItem(prompt_ids=pack_ids([*one, *two]), type_ids=types)
    return array("f", pooled_of(item, "score").data)[0]


async def test_pairs_are_scored_together(mesh: PoolMesh, client: httpx.AsyncClient) -> None:
    for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items")):
        for path in ("/score", "/v1/score"):
            answer = await post(client, path, **{names[0]: "a fox", names[1]: TEXTS})
            wanted = [pair_score("a fox", text) for text in TEXTS]
            assert [each["score"] for each in answer["data"]] == pytest.approx(wanted)
    answer = await post(client, "/score", data_1=TEXTS, data_2=TEXTS[::-1])
    wanted = [pair_score(one, two) for one, two in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted)


async def test_documents_are_ranked(mesh: PoolMesh, client: httpx.AsyncClient) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, {"content": [{"type": "text", "text": TEXTS[2]}]}]
    paths = ("/rerank", "/v1/rerank", "/v2/rerank")
    answers = [await post(client, path, query="a fox", documents=documents) for path in paths]
    answer = answers[0]
    assert [each["results"] for each in answers] == [answer["results"]] * 3
    scores = [pair_score("a fox", text) for text in TEXTS]
    order = sorted(range(3), key=scores.__getitem__, reverse=True)
    assert [each["index"] for each in answer["results"]] == order
    assert [each["relevance_score"] for each in answer["results"]] == sorted(scores, reverse=True)
    assert answer["results"][0]["document"]["text"] == TEXTS[order[0]]
    assert answer["usage"]["total_tokens"] > 0
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    answer = await post(
        client, "/rerank", query="a fox", documents=documents, top_n=1, return_documents=False
    )
    assert answer["results"] == [
        {"index": order[0], "relevance_score": scores[order[0]]},
    ]


async def test_tokens_of_queries_and_documents_are_bounded(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    body = {"query": TEXTS[0], "documents": [TEXTS[2]]}
    await post(client, "/rerank", **body, max_tokens_per_doc=2, max_tokens_per_query=1)
    ids = mesh.pools[-1].items[0].prompt_ids
    query, document = (tokens(text) for text in (TEXTS[0], TEXTS[2]))
    assert ids == pack_ids([*query[:1], *document[:2]])


async def test_cohere_gets_every_type(mesh: PoolMesh, client: httpx.AsyncClient) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"texts": TEXTS, "input_type": "search_query", "embedding_types": kinds}
    answer = await post(client, "/v2/embed", **body)
    found = answer["embeddings"]
    assert list(found) == kinds
    for index, text in enumerate(TEXTS):
        values = numpy.array(expected(text), "f4")
        assert found["float"][index] == values.tolist()
        assert base64.b64decode(found["base64"][index]) == values.tobytes()
        steps = numpy.rint(values * 127).astype(int)
        assert found["int8"][index] == steps.tolist()
        assert found["uint8"][index] == (steps + 128).tolist()
        bits = numpy.packbits(values >= 0).astype(int)
        assert found["ubinary"][index] == bits.tolist()
        assert found["binary"][index] == (bits - 128).tolist()
    assert answer["texts"] == TEXTS
    lengths = [len(tokens(text)) for text in TEXTS]
    assert answer["meta"]["billed_units"] == {"input_tokens": sum(lengths)}
    for path in ("/v1/embed", "/v2/embed"):
        answer = await post(client, path, texts=["a"])
        assert list(answer["embeddings"]) == ["float"]


async def test_cohere_truncates_and_uses_prompts(mesh: PoolMesh, client: httpx.AsyncClient) -> None:
    ids = tokens(TEXTS[2])
    for end, kept in (("END", ids[:3]), ("START", ids[-3:])):
        answer = await post(client, "/v2/embed", texts=[TEXTS[2]], truncate=end, max_tokens=3)
        assert answer["embeddings"]["float"] == [expected(kept)]
    mesh.tokenizer.prompts = {"query": "query: ", "title": "title: "}
    for purpose, text in (
        ("search_query", "query: jumps"),
        ("title", "title: jumps"),
        ("search_document", "jumps"),
    ):
        inputs = [{"content": [{"type": "text", "text": "jumps"}]}]
        answer = await post(client, "/v2/embed", inputs=inputs, input_type=purpose)
        assert answer["embeddings"]["float"] == [expected(text)]
        assert answer["texts"] == ["jumps"]


async def test_an_invocation_goes_to_the_route_of_its_fields(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/embeddings", {"input": TEXTS}),
        ("/v1/embeddings", {"messages": chat}),
        ("/v2/embed", {"texts": TEXTS}),
        ("/rerank", {"query": "a fox", "documents": TEXTS}),
        ("/score", {"text_1": "a fox", "text_2": TEXTS}),
        ("/score", {"queries": "a fox", "documents": TEXTS}),
    ):
        found, wanted = [
            await post(client, each, model=mesh.model, **body) for each in ("/invocations", path)
        ]
        for key in ("id", "created"):
            found.pop(key, None)
            wanted.pop(key, None)
        assert found == wanted


async def test_long_lists_of_ids_are_read_in_portions(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    given = [[200 + (index + shift) % 160 for index in range(250)] for shift in range(8)]
    answer = await post(client, "/v1/embeddings", input=given)
    assert [each["embedding"] for each in answer["data"]] == [expected(ids) for ids in given]


async def test_a_large_answer_is_written_in_portions(
    mesh: PoolMesh, client: httpx.AsyncClient
) -> None:
    texts = [f"text {index}" for index in range(1500)]
    mesh.tokenizer.texts_received.clear()
    answer = await post(client, "/v1/embeddings", input=texts)
    assert [each["embedding"] for each in answer["data"]] == [expected(text) for text in texts]
    assert len(mesh.pools) > 1
    assert {len(each.texts) for each in mesh.tokenizer.texts_received} == {1024, 476}
    answer = await post(client, "/v1/embeddings", input=texts[:1100], encoding_format="base64")
    data = [base64.b64decode(each["embedding"]) for each in answer["data"]]
    assert data == [array("f", expected(text)).tobytes() for text in texts[:1100]]
