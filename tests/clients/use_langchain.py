"""langchain: chat models of OpenAI and Anthropic, embeddings and reranking of OpenAI and Cohere."""

import os

from langchain_anthropic import ChatAnthropic
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL = os.environ["TOKENMESH_URL"]
CHAT, EMBEDDER = os.environ["CHAT_MODEL"], os.environ["EMBEDDING_MODEL"]
SUM = "What is 27 + 45?"


class Person(BaseModel):
    name: str
    age: int


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


chat = ChatOpenAI(model=CHAT, base_url=f"{URL}/v1", api_key="none")
assert "72" in chat.invoke(SUM).content
assert "72" in "".join(str(chunk.content) for chunk in chat.stream(SUM))
calls = chat.bind_tools([add], tool_choice="required").invoke(SUM, max_tokens=100).tool_calls
assert {call["name"] for call in calls} == {"add"}, calls
for method in ("json_schema", "function_calling"):
    found = chat.with_structured_output(Person, method=method).invoke(SUM)
    assert isinstance(found, Person), method
other = ChatAnthropic(model=CHAT, base_url=URL, api_key="none", max_tokens=100)
assert "72" in other.invoke(SUM).content

# tiktoken, which the check of lengths uses, downloads a file
embedder = OpenAIEmbeddings(
    model=EMBEDDER, base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False
)
vectors = embedder.embed_documents(["a fox", "a stone"])
assert vectors[0] == embedder.embed_query("a fox")
cohere = CohereEmbeddings(model=EMBEDDER, base_url=URL, cohere_api_key="none")
assert len(cohere.embed_documents(["a fox", "a stone"])) == 2
documents = [Document("a stone"), Document("an animal with red fur")]
reranker = CohereRerank(model=EMBEDDER, base_url=URL, cohere_api_key="none", top_n=1)
(best,) = reranker.compress_documents(documents, "a fox")
assert best.page_content == documents[1].page_content
