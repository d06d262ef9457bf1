"""cohere: embeddings in several types, and reranking."""

import os

import cohere

URL, EMBEDDER = os.environ["TOKENMESH_URL"], os.environ["EMBEDDING_MODEL"]
DOCUMENTS = ["a stone", "an animal with red fur"]

client = cohere.ClientV2(api_key="none", base_url=URL)
found = client.embed(
    model=EMBEDDER,
    texts=["a fox", "a stone"],
    input_type="search_document",
    embedding_types=["float", "int8", "ubinary"],
)
width = len(found.embeddings.float_[0])
assert len(found.embeddings.float_) == len(found.embeddings.int8) == 2
assert len(found.embeddings.ubinary[0]) == width // 8
ranked = client.rerank(model=EMBEDDER, query="a fox", documents=DOCUMENTS, top_n=2)
assert [each.index for each in ranked.results] == [1, 0]
assert ranked.results[0].relevance_score > ranked.results[1].relevance_score

parts = [{"content": [{"type": "text", "text": "a fox"}]}]
mixed = client.embed(model=EMBEDDER, inputs=parts, input_type="search_document")
assert mixed.embeddings.float_[0] == found.embeddings.float_[0]
try:
    client.embed(model=EMBEDDER, images=["data:image/png;base64,AAAA"], input_type="image")
except cohere.BadRequestError as error:
    assert "takes no images" in str(error)
else:
    raise AssertionError("a model for texts has embedded an image")

before = cohere.Client(api_key="none", base_url=URL)
ranked = before.rerank(model=EMBEDDER, query="a fox", documents=DOCUMENTS)
assert [each.index for each in ranked.results] == [1, 0]


CHAT = os.environ["CHAT_MODEL"]
question = [{"role": "user", "content": "What is 2 + 3?"}]
answer = client.chat(model=CHAT, messages=question, temperature=0, logprobs=True)
text = answer.message.content[0].text
assert answer.finish_reason == "COMPLETE"
assert answer.usage.tokens.output_tokens == len(answer.logprobs)
events = list(client.chat_stream(model=CHAT, messages=question, temperature=0))
kinds = [event.type for event in events]
assert kinds[:2] == ["message-start", "content-start"]
assert kinds[-2:] == ["content-end", "message-end"]
deltas = [event.delta.message.content.text for event in events if event.type == "content-delta"]
assert "".join(deltas) == text
assert events[-1].delta.usage.tokens.output_tokens == answer.usage.tokens.output_tokens
try:
    client.chat(model="none", messages=question)
except cohere.NotFoundError as error:
    assert "none" in str(error.body)
else:
    raise AssertionError("a model that is not served has answered")
