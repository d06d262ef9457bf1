"""A batch of conversations becomes Asks, one each, that are answered together."""

from collections.abc import Sequence
from dataclasses import replace

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.extras.batch_chat_request import BatchChatRequest
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http.turns import Turns
from tokenmesh.services.gateway.openai.chat_intake import ChatIntake
from tokenmesh.services.gateway.openai.prompt_places import located
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import RequestId


async def batch_asks(
    chats: ChatIntake, body: BatchChatRequest, exchange: RequestContext, limits: GatewaySettings
) -> list[GenerationRequest]:
    """Choice i of a conversation is number `conversation * n + i`. Raises InvalidInput."""
    num_conversations, n = len(body.messages), body.n or 1
    if num_conversations * n > limits.max_choices:
        raise InvalidInput(
            f"{num_conversations} conversations times n = {n} are over the limit of "
            f"{limits.max_choices} choices",
            param="messages",
        )
    asks: list[GenerationRequest] = []
    turns = Turns()
    for index, conversation in enumerate(body.conversations()):
        await turns.rest()
        where = f"messages[{index}]"
        try:
            # What all have in common is read and checked with the first.
            ask = (
                await chats.again(asks[0], conversation, exchange)
                if asks
                else await chats.ask(conversation, exchange)
            )
        except InvalidInput as error:
            raise located(error, where) from error
        job = replace(
            ask.jobs[0],
            request_id=RequestId(f"{exchange.request_id}-{index}"),
            first_choice=index * n,
            where=where,
        )
        asks.append(replace(ask, jobs=(job,)))
    return asks


def joined(asks: Sequence[GenerationRequest]) -> GenerationRequest:
    """All of them as one, for what they have in common."""
    return replace(asks[0], jobs=tuple(job for ask in asks for job in ask.jobs))
