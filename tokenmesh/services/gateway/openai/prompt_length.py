"""How many tokens the prompt of a chat has, by a tokenizer and without an answer."""

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.openai.chat_builder import chat_prompt
from tokenmesh.services.gateway.openai.request import ChatRequest
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.messages import Tokenize
from tokenmesh.shared.tokens import count_ids


async def count_prompt_tokens(gateway: Gateway, body: ChatRequest, exchange: RequestContext) -> int:
    """System prompt, tools and images included. Raises what is wrong with the chat."""
    card = await gateway.catalog.find_soon(body.model, exchange.request_id)
    exchange.model = card.name
    question = Tokenize(
        request_id=exchange.request_id,
        model=card.name,
        tenant=exchange.access.tenant.name,
        context_tokens=card.max_model_len,
        prompt=await chat_prompt(gateway.builder, body, exchange.access),
    )
    deadline_s = now_s() + gateway.settings.tokenize_timeout_s
    return count_ids((await gateway.calls.tokenize(question, deadline_s)).token_ids)
