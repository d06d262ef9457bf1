"""dspy: a model, a typed program, and an embedder."""

import os

import dspy

URL = os.environ["TOKENMESH_URL"]
fields = {"api_base": f"{URL}/v1", "api_key": "none"}
model = dspy.LM(f"openai/{os.environ['CHAT_MODEL']}", max_tokens=200, **fields)
(answer,) = model("What is 27 + 45?")
assert "72" in str(answer)
embedder = dspy.Embedder(f"openai/{os.environ['EMBEDDING_MODEL']}", **fields)
assert embedder(["a fox", "a stone"]).shape[0] == 2
