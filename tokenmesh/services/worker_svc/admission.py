"""Admission: a Generate becomes a Request, or an error that says why it cannot.

The gateway has validated the client's request; the worker checks again, since a message that
decodes must not be able to harm the engine.
"""

from tokenmesh.engine.exec.placeholders import largest_text_id
from tokenmesh.engine.request.check import check_length, check_sampling, in_range
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import (
    RequestSpec,
    StreamKey,
    TenantShare,
)
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.hashing import HASH_BYTES, Adapter
from tokenmesh.shared.messages.generate import Generate
from tokenmesh.shared.messages.media import ADD, AUDIO, EMBEDS, IMAGE, REPLACE, VIDEO, MediaItem
from tokenmesh.shared.messages.pooling import Pool
from tokenmesh.shared.messages.sampling import (
    SpeechRule,
)
from tokenmesh.shared.tenant_share import bounded_weight
from tokenmesh.shared.tensor_blob import TensorBlob
from tokenmesh.shared.tokens import unpack_ids

_MAX_COUNTER = 1 << 63

_MAX_RESERVATION = 128
"""Characters; schedulers write fewer."""

_MAX_TENANT = 64  # characters of its name, as in a key file


def admit(
    message: Generate,
    loaded: Loaded,
    block_size: int,
    traceparent: str | None = None,
    lora: Adapter | None = None,
) -> Request:
    """The engine's request, still without embeddings and the matrices of its adapter `lora`.

    Raises InvalidInput.
    """
    check_counters(message)
    if len(message.route_head) not in (0, HASH_BYTES):
        raise InvalidInput(f"route_head is not {HASH_BYTES} bytes long", param="route_head")
    prompt_ids = read_ids(message.prompt_ids, "prompt_ids")
    output_ids = read_ids(message.output_ids, "output_ids")
    if not prompt_ids:
        raise InvalidInput("the prompt holds no token", param="prompt_ids")
    check_sampling(message.sampling, loaded.vocab_size)
    lengths = len(prompt_ids), message.sampling.max_tokens
    check_length(*lengths, loaded.max_model_len, loaded.runner.num_blocks, block_size)
    if message.sampling.speech is not None and not loaded.encoder_states:
        raise InvalidInput("this model does not transcribe recordings", param="speech")
    media = sorted(message.media, key=lambda item: item.offset)
    check_media(media, loaded.media.reach(len(prompt_ids), loaded.max_model_len), loaded)
    if problem := loaded.media.problem_of(media, len(prompt_ids) + message.sampling.max_tokens):
        raise InvalidInput(problem, param="media")
    check_ids(prompt_ids, media, "prompt_ids", loaded.vocab_size)
    check_ids(output_ids, [], "output_ids", loaded.vocab_size)
    spec = RequestSpec(
        key=StreamKey(message.gateway, message.stream, message.attempt),
        request_id=message.request_id,
        num_prompt=len(prompt_ids),
        sampling=in_range(message.sampling, loaded.vocab_size),
        eos_ids=loaded.eos_token_ids,
        media=media,
        whole_runs=loaded.media.whole_runs(media),
        owner=tenant_of(message),
        priority=message.priority,
        cache_salt=loaded.cache_salt(message.cache_salt, len(prompt_ids)),
        rope_boundary=loaded.rope_boundary,
        route_head=message.route_head,
        route_salt=message.cache_salt,
        reservation=message.reservation[:_MAX_RESERVATION],
        traceparent=traceparent,
        lora=lora,
        reads_all=_check_alignment(message.sampling.speech, len(prompt_ids), loaded),
        prediction=_prediction_of(message, loaded),
    )
    return Request(spec, prompt_ids + output_ids)


def _prediction_of(message: Generate, loaded: Loaded) -> list[int]:
    """As much of it as the context has room for. Raises InvalidInput."""
    ids = read_ids(message.prediction_ids, "prediction_ids")[: loaded.max_model_len]
    check_ids(ids, [], "prediction_ids", loaded.vocab_size)
    return ids


def _check_alignment(rule: SpeechRule | None, num_prompt: int, loaded: Loaded) -> bool:
    """Return whether the prompt is to be aligned with its recording. Raises InvalidInput."""
    first, count = (0, 0) if rule is None else (rule.align_from, rule.align_states)
    if not (0 <= first < num_prompt and 0 <= count <= loaded.encoder_states):
        raise InvalidInput("align_from or align_states is out of range", param="speech")
    return count > 0


def check_counters(message: Generate | Pool) -> None:
    """Raises InvalidInput for a number that the engine could not count with."""
    counters = (message.stream, message.attempt, message.priority, message.tenant_priority)
    if min(counters[:2]) < 0 or max(map(abs, counters)) >= _MAX_COUNTER:
        raise InvalidInput("stream, attempt and priorities must be in range", param="stream")


def tenant_of(message: Generate | Pool) -> TenantShare:
    """Whose request it is, and its share."""
    weight = bounded_weight(message.weight)
    return TenantShare(message.tenant[:_MAX_TENANT], weight, message.tenant_priority)


def check_embeddings(
    item: MediaItem, blob: TensorBlob, width: int, encoder_states: int = 0
) -> None:
    """An encoder's output must fit the prompt and the model. Raises InvalidInput."""
    count = encoder_states or item.num_embeddings
    if blob.shape != (count, width):
        raise InvalidInput(
            f"embeddings of shape {list(blob.shape)} for {count} placeholders of width {width}",
            param="media",
        )


def read_ids(packed: bytes, name: str) -> list[int]:
    """Raises InvalidInput that names the field."""
    try:
        return unpack_ids(packed)
    except ValueError as error:
        raise InvalidInput(f"{name} is not a multiple of four bytes", param=name) from error


def check_ids(ids: list[int], media: list[MediaItem], name: str, vocab_size: int) -> None:
    """Raises InvalidInput for an id that the model lacks; placeholders of media may be any id."""
    largest = largest_text_id(ids, media)
    if largest >= vocab_size:
        raise InvalidInput(
            f"{name} holds the id {largest}; the model has {vocab_size} ids", param=name
        )


def check_media(media: list[MediaItem], num_prompt: int, loaded: Loaded) -> None:
    """media: by offset. Raises InvalidInput."""
    if loaded.encoder_states and ([item.kind for item in media] != [AUDIO] or media[0].offset):
        raise InvalidInput(
            "this model transcribes recordings: a prompt has one, at its first token", param="media"
        )
    for kind in dict.fromkeys(item.kind for item in media):
        if kind != EMBEDS and kind not in loaded.media.kinds:
            what = f"{kind}s" if kind in (IMAGE, VIDEO) else kind
            raise InvalidInput(f"this model takes no {what}", param="media")
    end = 0
    for item in media:
        if item.offset < end or item.length < 1 or item.end > num_prompt:
            raise InvalidInput(
                f"the media item at {item.offset} with {item.length} tokens overlaps another one "
                f"or lies outside of the prompt's {num_prompt} tokens",
                param="media",
            )
        ends = [each for hole in item.holes for each in hole]
        if sorted(ends) != ends or (ends and not 0 <= ends[0] <= ends[-1] <= item.length):
            raise InvalidInput(
                f"the media item at {item.offset} has holes out of order or outside of it",
                param="media",
            )
        if item.combine not in (REPLACE, ADD):
            raise InvalidInput(f"a media item combines by {item.combine!r}", param="media")
        end = item.end
