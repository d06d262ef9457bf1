"""The prompts of clips: which tokens ask a model for what."""

from dataclasses import dataclass

from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.audio import AudioClip, SpeechAsk, SpeechFacts
from tokenmesh.shared.messages.media import ADD, AUDIO, REPLACE, MediaItem
from tokenmesh.shared.messages.sampling import SpeechRule
from tokenmesh.shared.messages.tokenize import Tokenized
from tokenmesh.shared.tokens import pack_ids

_FALLBACK: str = "en"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTask:
    """It holds what is wanted of every clip."""

    facts: SpeechFacts
    translates: bool = False
    has_timestamps: bool = False
    previous_ids: tuple[int, ...] = ()
    """These are the ids of the text before the recording."""
    language: str | None = None
    """None: not detected yet, or a model of one language."""
    ask: SpeechAsk | None = None
    """The request's texts, for models whose prompts a tokenizer writes; None for others."""
    asked_ids: tuple[int, ...] = ()
    """The prompt that it has written, with one token for the embeddings of a clip."""

    def prompt(self, clip: AudioClip | None = None) -> list[int]:
        """The ids of a clip's prompt. `clip`: needed where its embeddings take tokens of it."""
        facts, ids = self.facts, []
        if self.asked_ids:
            assert clip is not None, "the prompt depends on the clip"
            at = self.asked_ids.index(facts.embed_id)
            embeds = [facts.embed_id] * clip.num_tokens
            return [*self.asked_ids[:at], *embeds, *self.asked_ids[at + 1 :]]
        if facts.prompt_ids:
            return list(facts.prompt_ids)
        if self.previous_ids:
            ids += [facts.previous_id, *self.previous_ids]
        ids.append(facts.start_id)
        if self.language is not None:
            ids.append(facts.languages[self.language])
            ids.append(facts.translate_id if self.translates else facts.transcribe_id)
        if not self.has_timestamps:
            ids.append(facts.no_timestamps_id)
        return ids

    def alignment(self, clip: AudioClip) -> SpeechRule:
        """For a prompt that a clip's transcript follows."""
        facts = self.facts
        hop = round(facts.rate * facts.timestamp_s / 2)  # samples of a frame, two to a state
        frames = -(-round((clip.end_s - clip.start_s) * facts.rate) // hop)
        return SpeechRule(align_from=len(self.prompt()), align_states=max(1, frames // 2))

    def max_tokens(self, clip: AudioClip, wanted: int | None) -> int | None:
        """Return the most tokens of the output: the model hears something with every token, where
        it hears them so.
        """
        facts = self.facts
        if not facts.prompt_ids:
            return wanted
        most = max(1, clip.num_tokens - len(facts.prompt_ids))
        return most if wanted is None else min(wanted, most)

    def rule(self) -> SpeechRule | None:
        """Return which tokens may be drawn; None: all."""
        facts = self.facts
        if facts.prompt_ids or self.ask is not None:
            return None
        return SpeechRule(
            suppress_ids=facts.suppress_ids,
            begin_suppress_ids=facts.begin_suppress_ids,
            end_id=facts.end_id,
            no_timestamps_id=facts.no_timestamps_id,
            first_timestamp_id=facts.first_timestamp_id if self.has_timestamps else -1,
            max_initial_timestamp=facts.max_initial_timestamp,
        )


def tokenized(ids: list[int], clip: AudioClip, facts: SpeechFacts) -> Tokenized:
    """A prompt about a clip. Where it does not hold the embeddings themselves, its item lies at the
    first token: all blocks depend on the clip.
    """
    is_added = bool(clip.num_tokens) and facts.embed_id < 0
    item = MediaItem(
        kind=AUDIO,
        content_hash=clip.content_hash,
        offset=ids.index(facts.embed_id) if facts.embed_id >= 0 else 0,
        length=clip.num_tokens or 1,
        features=clip.features,
        combine=ADD if is_added else REPLACE,
    )
    return Tokenized(token_ids=pack_ids(ids), media=[item])


def part_of_speech(part: AudioClip, offset: int, follows: str) -> MediaItem:
    """The item of the next part of speech, which is added to the tokens from `offset` on.

    `follows`: the content hash of the part before; empty: it is the first.
    """
    return MediaItem(
        kind=AUDIO,
        content_hash=part.content_hash,
        offset=offset,
        length=part.num_tokens,
        features=part.features,
        combine=ADD,
        follows=follows,
    )


def fallback_language(facts: SpeechFacts) -> str:
    """For a recording whose language cannot be detected."""
    return _FALLBACK if _FALLBACK in facts.languages else next(iter(facts.languages))


def check_language(language: str | None, facts: SpeechFacts) -> str | None:
    """The code in the model's spelling; None for none. Raises InvalidInput."""
    if not language:
        return None
    code = language.strip().lower()
    if facts.prompt_ids:
        raise InvalidInput(
            "the model finds the language itself: leave language out", param="language"
        )
    if facts.embed_id >= 0:
        return _named_language(code, language, facts)
    if not facts.languages and code == _FALLBACK:
        return None
    if code not in facts.languages:
        known = ", ".join(sorted(facts.languages)) or _FALLBACK
        raise invalid("language", f"{language[:40]!r} is not one of the model's languages: {known}")
    return code


def _named_language(code: str, given: str, facts: SpeechFacts) -> str:
    """The code of a language that prompts name, given by code or name. Raises InvalidInput."""
    names = {name.lower(): known for known, name in facts.language_names.items()}
    found = code if code in facts.language_names else names.get(code)
    if found is None and not names:
        raise NotSupported(
            "the model finds the language itself: leave language out", param="language"
        )
    if found is None:
        known = ", ".join(sorted(facts.language_names))
        raise invalid("language", f"{given[:40]!r} is not one of the model's languages: {known}")
    return found


def previous_text(prompt: str, facts: SpeechFacts) -> str:
    """Return what a model reads as the text before a recording; empty for none."""
    return f" {prompt.strip()}" if prompt.strip() and facts.previous_id >= 0 else ""


def check_previous(ids: list[int], facts: SpeechFacts) -> tuple[int, ...]:
    """The last ids of that text. Raises InvalidInput."""
    if any(token >= facts.end_id for token in ids):
        raise invalid("prompt", "holds special tokens of the model")
    return tuple(ids)
