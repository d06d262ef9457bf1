"""litellm: chat by three providers, embeddings and reranking in the forms of four servers."""

import os

import litellm

URL = os.environ["TOKENMESH_URL"]
CHAT, EMBEDDER = os.environ["CHAT_MODEL"], os.environ["EMBEDDING_MODEL"]
MESSAGES = [{"role": "user", "content": "What is 27 + 45?"}]
DOCUMENTS = ["a stone", "an animal with red fur"]

for provider, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("anthropic", URL)):
    fields = {"model": f"{provider}/{CHAT}", "api_base": base, "api_key": "none"}
    answer = litellm.completion(messages=MESSAGES, **fields)
    assert "72" in answer.choices[0].message.content, provider
    chunks = litellm.completion(messages=MESSAGES, stream=True, **fields)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content, provider

for provider in ("openai", "hosted_vllm"):
    vectors = litellm.embedding(
        model=f"{provider}/{EMBEDDER}", input=["a fox"] * 2, api_base=f"{URL}/v1", api_key="none"
    )
    assert len(vectors.data) == 2, provider

for provider, base in (("infinity", f"{URL}/v1"), ("cohere", f"{URL}/v2/embed")):
    vectors = litellm.embedding(
        model=f"{provider}/{EMBEDDER}",
        input=["a fox", "a stone"],
        **({"input_type": "search_document"} if provider == "cohere" else {}),
        api_base=base,
        api_key="none",
    )
    assert len(vectors.data) == 2, (provider, vectors)

for provider in ("cohere", "infinity", "hosted_vllm", "jina_ai"):
    found = litellm.rerank(
        model=f"{provider}/{EMBEDDER}",
        query="a fox",
        documents=DOCUMENTS,
        top_n=2,
        # Infinity's answer has a document as text, ours as Cohere's and vLLM's have it
        return_documents=provider != "infinity",
        api_base=URL,
        api_key="none",
    )
    assert [each["index"] for each in found.results] == [1, 0], (provider, found)
