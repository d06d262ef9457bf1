"""infinity-client: embeddings and reranking as Infinity serves them."""

import os

from infinity_client import Client
from infinity_client.api.default import embeddings, rerank
from infinity_client.models import OpenAIEmbeddingInputText, RerankInput

EMBEDDER = os.environ["EMBEDDING_MODEL"]
DOCUMENTS = ["a stone", "an animal with red fur"]

with Client(base_url=f"{os.environ['TOKENMESH_URL']}/v1") as client:
    body = OpenAIEmbeddingInputText.from_dict({"model": EMBEDDER, "input": ["a fox", "a stone"]})
    found = embeddings.sync(client=client, body=body)
    assert len(found.data) == 2, found
    query = RerankInput(model=EMBEDDER, query="a fox", documents=DOCUMENTS)
    ranked = rerank.sync(client=client, body=query)
    assert [each.index for each in ranked.results] == [1, 0], ranked
