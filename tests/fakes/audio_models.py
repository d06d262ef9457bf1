"""Tiny random checkpoints of models that take recordings: weights, tokenizer, feature extractor.

A second of sound is a few tokens; weights are far from neutral.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import transformers
from torch.nn import functional as F
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from tests.fakes.media_checkpoint import TEXT, loaded, with_weights, write_tokenizer_config
from tests.fakes.tokenizers import byte_level_bpe, write_json
from tokenmesh.services.tokenizer_svc.media.recordings import RecordingProcessor

_WHISPER: Final[Mapping[str, Any]] = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 200,
}
_ENCODER: Final[Mapping[str, Any]] = {
    "num_mel_bins": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 128,
    "max_source_positions": 200,
}
_WINDOW: Final[Mapping[str, Any]] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 16,
    "chunk_length": 4,
}
"""4 s."""
_STREAMING: Final[Mapping[str, Any]] = {
    "sampling_rate": 16000,
    "frame_rate": 12.5,
    "encoding_config": {"num_mel_bins": 16, "hop_length": 160, "window_size": 400},
    "transcription_format": "streaming",
    "transcription_delay_ms": 240,
    "streaming_look_ahead_ms": 80.0,
    "streaming_look_back_ms": 80.0,
    "streaming_n_left_pad_tokens": 5,
}
"""As in a tekken.json."""
_QWEN_TOKENS: Final = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}


@dataclass(frozen=True, slots=True)
class AudioFake:
    """A checkpoint to make."""

    architecture: str
    text: Mapping[str, Any]
    """Sizes of the language model, in addition to those of all."""
    audio: Mapping[str, Any]
    extractor: Mapping[str, Any]
    """preprocessor_config.json"""
    tokens: Mapping[str, str]
    """Special tokens by their attribute of the tokenizer; the first takes the embeddings."""
    placeholder: str
    """The text that the chat template writes for a recording."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of config.json."""


AUDIO: Final[Mapping[str, AudioFake]] = {
    "qwen2_audio": AudioFake(
        "Qwen2AudioForConditionalGeneration",
        text={"model_type": "qwen2"},
        audio={"model_type": "qwen2_audio_encoder", **_WHISPER},
        extractor=_WINDOW,
        tokens={
            "audio_token": "<|AUDIO|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        placeholder="Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n",
    ),
    "voxtral": AudioFake(
        "VoxtralForConditionalGeneration",
        text={"model_type": "llama"},
        audio={"model_type": "voxtral_encoder", **_ENCODER},
        extractor=_WINDOW,
        tokens={"audio_token": "[AUDIO]", "begin_audio_token": "[BEGIN_AUDIO]"},
        placeholder="[BEGIN_AUDIO][AUDIO]",
    ),
    "qwen3_asr": AudioFake(
        "Qwen3ASRForConditionalGeneration",
        text={"model_type": "qwen3"},
        audio={
            "model_type": "qwen3_asr_encoder",
            **{k: v for k, v in _WHISPER.items() if k != "max_source_positions"},
            "output_dim": 64,
            "n_window_infer": 200,
            "downsample_hidden_size": 8,
        },
        extractor={
            "feature_extractor_type": "Qwen3ASRFeatureExtractor",
            "feature_size": 16,
            "min_length": 8000,
        },
        tokens=_QWEN_TOKENS,
        placeholder="<|audio_start|><|audio_pad|><|audio_end|>",
        more={"timestamp_token_id": 6},
    ),
    "glmasr": AudioFake(
        "GlmAsrForConditionalGeneration",
        text={"model_type": "llama"},
        audio={"model_type": "glmasr_encoder", **_ENCODER, "num_key_value_heads": 2},
        extractor=_WINDOW,
        tokens={
            "audio_token": "<|pad|>",
            "audio_bos_token": "<|begin_of_audio|>",
            "audio_eos_token": "<|end_of_audio|>",
        },
        placeholder="<|begin_of_audio|><|pad|><|end_of_audio|>",
    ),
    "audioflamingo3": AudioFake(
        "AudioFlamingo3ForConditionalGeneration",
        text={"model_type": "qwen2"},
        audio={"model_type": "audioflamingo3_encoder", **_ENCODER, "intermediate_size": 48},
        extractor=_WINDOW,
        tokens={"audio_token": "<sound>"},
        placeholder="<sound>",
    ),
    "fun_asr_nano": AudioFake(
        "FunAsrNanoForConditionalGeneration",
        text={"model_type": "qwen3"},
        audio={
            "model_type": "fun_asr_nano_encoder",
            "num_mel_bins": 16,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_timestamp_prediction_layers": 1,
            "max_position_embeddings": 512,
        },
        extractor={"feature_extractor_type": "FunAsrNanoFeatureExtractor", "feature_size": 16},
        tokens={"audio_token": "<|object_ref_start|>"},
        placeholder="<|object_ref_start|>",
        more={
            "adaptor_config": {
                "hidden_size": 64,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "projector_hidden_size": 48,
            }
        },
    ),
}
"""By the model type in config.json."""


def audio_checkpoint(directory: Path, name: str, *more: str) -> Path:
    """The whole checkpoint. more: special tokens besides its own."""
    fake = AUDIO[name]
    byte_level_bpe(directory, *fake.tokens.values(), *more)
    write_tokenizer_config(directory, fake.tokens, audio=fake.placeholder)
    write_json(directory / "preprocessor_config.json", fake.extractor)
    stated = {
        "architectures": [fake.architecture],
        "model_type": name,
        "tie_word_embeddings": False,
        "text_config": {**TEXT, **fake.text},
        "audio_config": dict(fake.audio),
        "audio_token_id": 3,
        "pad_token_id": 0,
        "eos_token_id": 2,
        **fake.more,
    }
    write_json(directory / "config.json", stated)
    return with_weights(directory, fake.architecture)


_ASKED_TEMPLATE: Final = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'audio' %}AUDIO\
{% elif part['type'] == 'keywords' %}words: {{ part['keywords'] | join(', ') }}
{% elif part['type'] == 'language' %}into {{ part['language'] }}
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def asked_checkpoint(directory: Path, name: str) -> Path:
    """The whole checkpoint, whose tokenizer and template have what transcripts are asked with."""
    more = ("<s>", "[INST]", "[/INST]", "[TRANSCRIBE]") if name == "voxtral" else ()
    audio_checkpoint(directory, name, *more)
    stated = json.loads((directory / "tokenizer_config.json").read_text())
    stated["chat_template"] = _ASKED_TEMPLATE.replace("AUDIO", AUDIO[name].placeholder)
    if more:
        stated["bos_token"] = "<s>"
    write_json(directory / "tokenizer_config.json", stated)
    return directory


def audio_oracle(directory: Path, name: str) -> Any:
    """transformers' own model of the checkpoint."""
    model = loaded(directory, AUDIO[name].architecture)
    return hear_each_alone(model) if name == "fun_asr_nano" else model


def hear_each_alone(model: Any) -> Any:
    """Encode the recordings of a batch one by one: the adaptor sees what pads a shorter one."""
    whole = model.model.get_audio_features

    def features(input_features: Any, input_features_mask: Any, **named: Any) -> Any:
        found = [
            whole(each[None, :length], mask[None, :length], **named).pooler_output
            for each, mask, length in zip(
                input_features, input_features_mask, input_features_mask.sum(1), strict=True
            )
        ]
        return SimpleNamespace(pooler_output=torch.cat(found))

    model.model.get_audio_features = features
    return model


def streaming_checkpoint(directory: Path, context: int = 1024) -> Path:
    """Voxtral Realtime, whose recordings are added to all tokens. context: in tokens."""
    byte_level_bpe(directory, "<s>", "[STREAMING_PAD]")
    write_tokenizer_config(directory, {})
    extractor = {"feature_extractor_type": "VoxtralRealtimeFeatureExtractor", "feature_size": 16}
    write_json(directory / "preprocessor_config.json", extractor)
    write_json(directory / "tekken.json", {"audio": _STREAMING})
    audio = {
        **{key: each for key, each in _ENCODER.items() if key != "max_source_positions"},
        "head_dim": 16,
        "sliding_window": 40,
    }
    stated = {
        "architectures": ["VoxtralRealtimeForConditionalGeneration"],
        "model_type": "voxtral_realtime",
        "default_num_delay_tokens": 3,
        "text_config": {
            **TEXT,
            "model_type": "voxtral_realtime_text",
            "max_position_embeddings": context,
            "bos_token_id": 3,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
        "audio_config": {**audio, "model_type": "voxtral_realtime_encoder"},
        "eos_token_id": 2,
    }
    write_json(directory / "config.json", stated)
    return with_weights(directory, "VoxtralRealtimeForConditionalGeneration")


_PROCESSORS: Final = {
    "qwen2_audio": "Qwen2AudioProcessor",
    "qwen3_asr": "Qwen3ASRProcessor",
    "glmasr": "GlmAsrProcessor",
    "audioflamingo3": "AudioFlamingo3Processor",
}


def their_inputs(directory: Path, name: str, text: str, recordings: list[Any]) -> Any:
    """Return transformers' inputs for a prompt with all its recordings."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    if name == "fun_asr_nano":
        return _of_fun_asr_nano(directory, tokenizer, text, recordings)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(directory)
    use_numpy(extractor)
    if name == "voxtral":
        return _of_voxtral(tokenizer, extractor, text, recordings)
    kind = getattr(transformers, _PROCESSORS[name])
    # which want one recording in a prompt
    members = {"validate_inputs": lambda *_args, **_named: None}
    options = {} if name == "qwen3_asr" else {"audio_token": AUDIO[name].tokens["audio_token"]}
    processor = type(kind.__name__, (kind,), members)(extractor, tokenizer, **options)
    if not recordings:
        return tokenizer(text, return_tensors="pt")
    named = {"return_tensors": "pt", "sampling_rate": 16000}
    if name != "qwen3_asr":
        return processor(text=[text], audio=recordings, **named)
    # which has one recording in a prompt, and in a batch mixes the end of one with its padding
    token = AUDIO[name].tokens["audio_token"]
    found = [processor(text=[token], audio=[each], **named) for each in recordings]
    longest = max(each["input_features"].shape[-1] for each in found)
    pieces = text.split(token)
    whole = pieces[0]
    for each, after in zip(found, pieces[1:], strict=True):
        whole += token * each["input_ids"].shape[-1] + after
    padded = {
        key: torch.cat([F.pad(each[key], (0, longest - each[key].shape[-1])) for each in found])
        for key in ("input_features", "input_features_mask")
    }
    return {**tokenizer(whole, return_tensors="pt"), **padded}


def _of_voxtral(tokenizer: Any, extractor: Any, text: str, recordings: list[Any]) -> Any:
    """Its processor writes prompts by a package that reads Mistral's files only."""
    if not recordings:
        return tokenizer(text, return_tensors="pt")
    maker: Any = SimpleNamespace(feature_extractor=extractor)
    options = {"padding": True, "truncation": False, "return_tensors": "pt"}
    options |= {"sampling_rate": 16000, "pad_to_multiple_of": extractor.n_samples}
    pieces = text.split("[AUDIO]")
    whole, features = pieces[0], []
    for each, after in zip(recordings, pieces[1:], strict=True):
        found = VoxtralProcessor._retrieve_input_features(
            maker, [each], extractor.nb_max_frames, **options
        )
        features.append(found)
        whole += "[AUDIO]" * (len(found) * 50) + after  # 200 states, four to a token
    return {**tokenizer(whole, return_tensors="pt"), "input_features": torch.cat(features)}


def _of_fun_asr_nano(directory: Path, tokenizer: Any, text: str, recordings: list[Any]) -> Any:
    """With our filter banks, which test_kaldi compares: transformers takes torchaudio's."""
    if not recordings:
        return tokenizer(text, return_tensors="pt")
    make: Any = RecordingProcessor(directory)._mel.extractor
    found = [torch.tensor(make(each)) for each in recordings]
    token, longest = AUDIO["fun_asr_nano"].tokens["audio_token"], max(map(len, found))
    pieces = text.split(token)
    whole = pieces[0]
    for each, after in zip(found, pieces[1:], strict=True):
        whole += token * len(each) + after
    padded = torch.stack([F.pad(each, (0, 0, 0, longest - len(each))) for each in found])
    mask = torch.stack([(torch.arange(longest) < len(each)).long() for each in found])
    inputs = {"input_features": padded, "input_features_mask": mask}
    return {**tokenizer(whole, return_tensors="pt"), **inputs}


def use_numpy(extractor: Any) -> None:
    """As without torch: greedy tokens of random weights flip at other roundings."""
    if not hasattr(extractor, "_torch_extract_fbank_features"):
        return
    mel: Any = transformers.WhisperFeatureExtractor._np_extract_fbank_features
    extractor._torch_extract_fbank_features = mel.__get__(extractor)
