"""Every message that crosses a process, in one closed union.

Evolution rules: a new field has a default; a field is never renamed, retyped or removed; a message
that is no longer sent stays decodable for one minor version. Golden files in tests hold
yesterday's bytes.
"""

from tokenmesh.shared.messages.adapters import (
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from tokenmesh.shared.messages.audio import (
    AudioPrepared,
    PrepareAudio,
    PrepareSpeech,
    SpeechPrepared,
)
from tokenmesh.shared.messages.beat import Heartbeat
from tokenmesh.shared.messages.blocks import (
    BlockEvents,
    BlockEventsReplayed,
    BlocksHeld,
    BlocksRead,
    ReadBlocks,
    ReplayBlockEvents,
)
from tokenmesh.shared.messages.control import (
    MetricsRead,
    Profiled,
    ReadMetrics,
    Sleep,
    Slept,
    StartProfile,
    StopProfile,
    WakeUp,
    Woken,
)
from tokenmesh.shared.messages.failed import Failed
from tokenmesh.shared.messages.generate import (
    AbortRequests,
    Accepted,
    Cancel,
    Done,
    Drain,
    Generate,
    Ping,
    Resend,
    StreamUnknown,
)
from tokenmesh.shared.messages.kv import KvReady, KvStarted, PollKv, PrefillKv, ReleaseKv
from tokenmesh.shared.messages.media import Encode, Encoded
from tokenmesh.shared.messages.place import Awake, Place, Placed, Queued, Refused, Wake
from tokenmesh.shared.messages.pooling import Pool, PoolAnswer
from tokenmesh.shared.messages.tokenize import (
    Describe,
    Described,
    Detokenize,
    Detokenized,
    PromptRead,
    ReadPrompt,
    ReadTokenizer,
    ReadTokenizerConfig,
    TextsTokenized,
    Tokenize,
    Tokenized,
    TokenizerConfigRead,
    TokenizerRead,
    TokenizeTexts,
)
from tokenmesh.shared.messages.tokens import Tokens

Message = (
    Tokenize
    | Tokenized
    | TokenizeTexts
    | TextsTokenized
    | Detokenize
    | Detokenized
    | ReadPrompt
    | PromptRead
    | Describe
    | Described
    | ReadTokenizer
    | TokenizerRead
    | ReadTokenizerConfig
    | TokenizerConfigRead
    | PrepareAudio
    | AudioPrepared
    | PrepareSpeech
    | SpeechPrepared
    | Encode
    | Encoded
    | Place
    | Placed
    | Queued
    | Refused
    | Wake
    | Awake
    | Generate
    | Accepted
    | Pool
    | PoolAnswer
    | Cancel
    | AbortRequests
    | Resend
    | Ping
    | Drain
    | Done
    | StreamUnknown
    | Sleep
    | Slept
    | WakeUp
    | Woken
    | StartProfile
    | StopProfile
    | Profiled
    | ReadMetrics
    | MetricsRead
    | Heartbeat
    | BlockEvents
    | BlocksHeld
    | ReplayBlockEvents
    | BlockEventsReplayed
    | ReadBlocks
    | BlocksRead
    | LoadAdapter
    | AdapterLoaded
    | UnloadAdapter
    | AdapterUnloaded
    | PrefillKv
    | KvStarted
    | PollKv
    | KvReady
    | ReleaseKv
    | Failed
)
"""Everything but `Tokens`, which is array-like and travels on a subject of its own."""

__all__ = [
    "AbortRequests",
    "Accepted",
    "AdapterLoaded",
    "AdapterUnloaded",
    "AudioPrepared",
    "Awake",
    "BlockEvents",
    "BlockEventsReplayed",
    "BlocksHeld",
    "BlocksRead",
    "Cancel",
    "Describe",
    "Described",
    "Detokenize",
    "Detokenized",
    "Done",
    "Drain",
    "Encode",
    "Encoded",
    "Failed",
    "Generate",
    "Heartbeat",
    "KvReady",
    "KvStarted",
    "LoadAdapter",
    "Message",
    "MetricsRead",
    "Ping",
    "Place",
    "Placed",
    "PollKv",
    "Pool",
    "PoolAnswer",
    "PrefillKv",
    "PrepareAudio",
    "PrepareSpeech",
    "Profiled",
    "PromptRead",
    "Queued",
    "ReadBlocks",
    "ReadMetrics",
    "ReadPrompt",
    "ReadTokenizer",
    "ReadTokenizerConfig",
    "Refused",
    "ReleaseKv",
    "ReplayBlockEvents",
    "Resend",
    "Sleep",
    "Slept",
    "SpeechPrepared",
    "StartProfile",
    "StopProfile",
    "StreamUnknown",
    "TextsTokenized",
    "Tokenize",
    "TokenizeTexts",
    "Tokenized",
    "TokenizerConfigRead",
    "TokenizerRead",
    "Tokens",
    "UnloadAdapter",
    "Wake",
    "WakeUp",
    "Woken",
]
