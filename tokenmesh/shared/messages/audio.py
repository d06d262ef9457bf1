"""Messages to tokenizer_svc about recordings, and what it knows of a model that transcribes them.

A recording is cut into clips, each at most as long as the model's window. Their features travel by
reference into the blob store, a few clips at a time.
"""

import msgspec

from tokenmesh.shared.ids import BlobKey, ModelName, RequestId


class SpeechFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts that make prompts of transcripts; ids are token ids, -1 where there is none."""

    start_id: int
    """The first token of every prompt."""
    end_id: int = -1
    """Ends a transcript. Text has smaller ids; -1: so has everything else."""
    languages: dict[str, int] = {}
    """Code -> id; empty: the model knows one language, which its prompt does not name."""
    transcribe_id: int = -1
    translate_id: int = -1
    previous_id: int = -1
    """Before text that came before the clip."""
    no_speech_id: int = -1
    no_timestamps_id: int = -1
    first_timestamp_id: int = -1
    num_timestamps: int = 0
    timestamp_s: float = 0.02
    """Between two timestamps."""
    max_initial_timestamp: int = -1
    """Number of the latest timestamp that an output may begin with; -1: any."""
    suppress_ids: list[int] = []
    """Never drawn."""
    begin_suppress_ids: list[int] = []
    """Not drawn as the first token."""
    window_s: float = 30.0
    """Longest clip."""
    rate: int = 16000
    """Samples a second."""
    max_previous_tokens: int = 223
    """Tokens of the text before the clip that a prompt may repeat."""
    prompt_ids: list[int] = []
    """The prompt of a model whose recordings are added to all tokens, those of the output included;
    empty: prompts are made of the ids above."""
    hidden_ids: list[int] = []
    """Drawn, but no text: of such a model, which draws one token for each part of a clip."""
    aligns: bool = False
    """True where the checkpoint names heads that follow the speech, which words' times come
    from."""
    follows_speech: bool = False
    """True where speech can be transcribed in parts while it goes on (PrepareSpeech)."""
    embed_id: int = -1
    """The token that takes the embeddings of a clip, of a model that hears in chats: a tokenizer
    writes its prompts (SpeechAsk). -1: prompts are made of the ids above."""
    language_names: dict[str, str] = {}
    """Code -> the name in texts of such a model; empty: its prompts name no language."""
    takes_prompt: bool = False
    takes_keywords: bool = False
    translates: bool = False
    marker: str = ""
    """Text of such a model's answers before the transcript."""
    is_framed: bool = False
    """True where its answers may be a sentence that quotes the transcript."""


class SpeechAsk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to a model that hears in chats, for which a tokenizer finds the words."""

    language: str = ""
    """Code of one of its languages."""
    prompt: str = ""
    keywords: list[str] = []
    translates: bool = False


class PrepareAudio(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Decode a recording and store the features of some of its clips.

    Answered with AudioPrepared or Failed. The cuts are the same each time.
    """

    request_id: RequestId
    model: ModelName
    source: BlobKey
    """The file, or raw samples where `rate` is set."""
    rate: int = 0
    """The sampling rate of raw samples, 16 bits, little-endian, mono; 0: the blob is a file."""
    first: int = 0
    """The first clip whose features are stored."""
    count: int = 1
    tenant: str = ""
    """Whose request it is: tenants take turns."""
    ask: SpeechAsk | None = None
    """For models with `embed_id`."""


class AudioClip(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One clip of a recording."""

    start_s: float
    end_s: float
    content_hash: str
    """Hex digest of its samples plus preprocessing options: the identity for every cache."""
    features: BlobKey
    num_tokens: int = 0
    """Tokens of prompt and output together that it is added to, for models with `prompt_ids`; those
    that take its embeddings, for models with `embed_id`."""


class AudioPrepared(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The requested clips, in order."""

    duration_s: float
    """Seconds of the whole recording."""
    total: int
    """Clips of the whole recording."""
    clips: list[AudioClip]
    prompt_ids: bytes = b""
    """The prompt of each clip, packed, with one `embed_id`, for models that have it."""


class PrepareSpeech(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Store the features of the next part of speech that may still go on.

    For models with `prompt_ids`. Answered with SpeechPrepared or Failed.
    """

    request_id: RequestId
    model: ModelName
    source: BlobKey
    """Samples of the speech from `first_sample` to those heard so far: 16 bits, little-endian,
    mono."""
    rate: int
    first_sample: int = 0
    """A number that an earlier SpeechPrepared has returned, or 0."""
    first_token: int = 0
    """The tokens before this one have their features."""
    follows: str = ""
    """`content_hash` of the part before; empty for the first one."""
    is_end: bool = False
    """True where the speech ends with these samples; silence follows them."""
    tenant: str = ""


class SpeechPrepared(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The part of speech whose features no later sample changes."""

    part: AudioClip | None = None
    """None: the samples do not fill one more token."""
    next_sample: int = 0
    """The first one that the next part needs."""
