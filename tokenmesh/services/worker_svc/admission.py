"""Admission: a Generate becomes a Request, or an error that says why it cannot.

The gateway has validated the client's request; the worker checks again, since a message that
decodes must not be able to harm the engine.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from tokenmesh.engine.exec.placeholders import largest_text_id
from tokenmesh.engine.plan import MAX_MARKER_IDS, MAX_OTHER_ENDS
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import (
    RequestSpec,
    StreamKey,
    TenantShare,
)
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.shared.errors import InvalidInput, PromptTooLong
from tokenmesh.shared.hashing import HASH_BYTES, Adapter
from tokenmesh.shared.ids import SEED_BITS
from tokenmesh.shared.messages.generate import Generate
from tokenmesh.shared.messages.media import ADD, AUDIO, EMBEDS, IMAGE, REPLACE, VIDEO, MediaItem
from tokenmesh.shared.messages.pooling import Pool
from tokenmesh.shared.messages.sampling import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_REPETITION_PATTERN,
    RANGES,
    SamplingParams,
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
    _check_length(len(prompt_ids), message.sampling.max_tokens, loaded, block_size)
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
        sampling=_in_range(message.sampling, loaded.vocab_size),
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
    )
    return Request(spec, prompt_ids + output_ids)


def _check_alignment(rule: SpeechRule | None, num_prompt: int, loaded: Loaded) -> bool:
    """Whether the prompt is to be aligned with its recording. Raises InvalidInput."""
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


def _check_length(num_prompt: int, max_tokens: int, loaded: Loaded, block_size: int) -> None:
    total = num_prompt + max_tokens
    if total > loaded.max_model_len:
        raise PromptTooLong(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} are {total} tokens; the "
            f"model's context holds {loaded.max_model_len}",
            param="max_tokens",
        )
    # the last token is never computed
    room = (loaded.runner.num_blocks - 1) * block_size + 1
    if total > room:
        raise PromptTooLong(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} are {total} tokens; this "
            f"worker's KV cache holds {room}",
            param="max_tokens",
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


def _in_range(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """The same meaning in numbers that fit a tensor: any seed, top_k and stop token is allowed, and
    whatever is above 0 where 0 is not."""
    seed = sampling.seed & ((1 << SEED_BITS) - 1)
    top_k = 0 if sampling.top_k >= vocab_size else sampling.top_k
    stops = [token for token in sampling.stop_token_ids if 0 <= token < vocab_size]
    return msgspec.structs.replace(
        sampling,
        seed=seed,
        top_k=top_k,
        stop_token_ids=stops,
        top_p=max(sampling.top_p, _LEAST),
        repetition_penalty=max(sampling.repetition_penalty, _LEAST),
    )


_LEAST: Final = 1e-9
"""Logits that are divided by less overflow."""


_MAX_COUNT: Final = 2**30


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidInput that names the first field at fault."""
    if sampling.max_tokens < 1:
        raise InvalidInput(f"max_tokens is {sampling.max_tokens}, not positive", param="max_tokens")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidInput(
            f"min_tokens is {sampling.min_tokens}, not in [0, max_tokens]", param="min_tokens"
        )
    if sampling.top_k < 0:
        raise InvalidInput(f"top_k is {sampling.top_k}, not in [0, ...)", param="top_k")
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if not allowed.holds(value):
            raise InvalidInput(f"{name} is {value}, not in {allowed}", param=name)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and not 0 <= count <= vocab_size:
            raise InvalidInput(f"{name} is {count}, not in [0, {vocab_size}]", param=name)
    _check_sampled_ids(sampling, vocab_size)
    _check_named(sampling, vocab_size)
    _check_repetition(sampling)
    _check_thinking(sampling, vocab_size)
    if (rule := sampling.speech) is not None:
        ids = [rule.end_id, rule.no_timestamps_id, rule.first_timestamp_id]
        times = ids if rule.first_timestamp_id >= 0 else []
        _check_range("speech", [*rule.suppress_ids, *rule.begin_suppress_ids, *times], vocab_size)


def _check_sampled_ids(sampling: SamplingParams, vocab_size: int) -> None:
    _check_range("logit_bias", sampling.logit_bias, vocab_size)
    for token, bias in sampling.logit_bias.items():
        if not -1e9 <= bias <= 1e9:
            raise InvalidInput(f"logit_bias of {token} is {bias}", param="logit_bias")
    if sampling.allowed_token_ids is not None:
        if not sampling.allowed_token_ids:
            raise InvalidInput("allowed_token_ids is empty", param="allowed_token_ids")
        _check_range("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    for word in sampling.bad_words_ids:
        if not word:
            raise InvalidInput("bad_words_ids holds an empty word", param="bad_words_ids")
        _check_range("bad_words_ids", word, vocab_size)


def _check_named(sampling: SamplingParams, vocab_size: int) -> None:
    named = sampling.logprob_token_ids
    if not named:
        return
    if sampling.logprobs is None or len(named) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidInput(
            f"logprob_token_ids needs logprobs and at most {MAX_LOGPROB_TOKEN_IDS} ids",
            param="logprob_token_ids",
        )
    _check_range("logprob_token_ids", named, vocab_size)


def _check_repetition(sampling: SamplingParams) -> None:
    rule = sampling.repetition
    if rule is not None and not (
        1 <= rule.min_size <= rule.max_size <= MAX_REPETITION_PATTERN
        and 2 <= rule.min_count <= _MAX_COUNT
    ):
        raise InvalidInput(f"repetition is {rule}, which is out of range", param="repetition")


def _check_thinking(sampling: SamplingParams, vocab_size: int) -> None:
    budget = sampling.thinking
    if budget is None:
        return
    for count in (budget.num_tokens, budget.num_spent):
        if not 0 <= count <= _MAX_COUNT:
            raise InvalidInput(f"a number of thinking is {count}", param="thinking")
    ends = [budget.end_ids, *budget.other_ends]
    lengths = [len(budget.start_ids) or 1, *map(len, ends)]
    if not 1 <= min(lengths) <= max(lengths) <= MAX_MARKER_IDS or len(ends) > 1 + MAX_OTHER_ENDS:
        raise InvalidInput(
            f"thinking holds a marker that has not 1 to {MAX_MARKER_IDS} ids, or more than "
            f"{MAX_OTHER_ENDS} further ends",
            param="thinking",
        )
    for marker in (budget.start_ids, *ends):
        _check_range("thinking", marker, vocab_size)


def _check_range(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidInput(
                f"{name} holds the id {token}; the model has {vocab_size} ids", param=name
            )
