"""llama-index: chat, embeddings of OpenAI's form, reranking of Cohere's."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.cohere_rerank import CohereRerank

URL = os.environ["TOKENMESH_URL"]
CHAT, EMBEDDER = os.environ["CHAT_MODEL"], os.environ["EMBEDDING_MODEL"]

model = OpenAILike(model=CHAT, api_base=f"{URL}/v1", api_key="none", is_chat_model=True)
question = [ChatMessage(role="user", content="What is 27 + 45?")]
assert "72" in str(model.chat(question))
assert "72" in "".join(chunk.delta or "" for chunk in model.stream_chat(question))
embedder = OpenAILikeEmbedding(model_name=EMBEDDER, api_base=f"{URL}/v1", api_key="none")
vectors = embedder.get_text_embedding_batch(["a fox", "a stone"])
assert vectors[0] == embedder.get_text_embedding("a fox")
nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("a stone", "an animal with red fur")]
reranker = CohereRerank(model=EMBEDDER, api_key="none", base_url=URL, top_n=1)
(best,) = reranker.postprocess_nodes(nodes, query_str="a fox")
assert best.node.text == "an animal with red fur"
