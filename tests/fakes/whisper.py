"""A tiny whisper checkpoint: random weights, a tokenizer, a feature extractor, generation_config.

Its clips are 4 s long and its encoder has 200 states: a state is 20 ms, as in every whisper.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput, ModelOutput
from transformers.models.whisper.tokenization_whisper import _collate_word_timestamps

from tests.fakes.models import randomized
from tests.fakes.tokenizers import CORPUS

CLIP_S: Final = 4
STATES: Final = 200
HIDDEN: Final = 32
MAX_TOKENS: Final = 96
END: Final = 300
"""<|endoftext|>; smaller ids are text."""
FIRST_TIME: Final = 312
"""<|0.00|>"""
LANGUAGES: Final = ("en", "de", "fr", "es")
_TASKS: Final = (
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
    *("<|nospeech|>", "<|notimestamps|>"),
)
SUPPRESSED: Final = (3, 9, 41, 60)
BLANK: Final = " "


def _tokenizer(directory: Path) -> Any:
    """The ids are text, <|endoftext|>, <|startoftranscript|>, languages, tasks, timestamps."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(directory / "bpe.json"))
    tokenizer = WhisperTokenizer(
        vocab=backend.get_vocab(),
        merges=[tuple(pair) for pair in _merges(backend)],
        unk_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_tokens([AddedToken("<|endoftext|>", special=True)], special_tokens=True)
    languages = [f"<|{language}|>" for language in LANGUAGES]
    specials = ["<|startoftranscript|>", *languages, *_TASKS]
    tokenizer.add_tokens([AddedToken(each, special=True) for each in specials], special_tokens=True)
    times = [f"<|{index * 0.02:.2f}|>" for index in range(STATES + 1)]
    tokenizer.add_tokens([AddedToken(each, special=False) for each in times])
    (directory / "bpe.json").unlink()
    return tokenizer


def _merges(backend: Tokenizer) -> list[list[str]]:
    return json.loads(backend.to_str())["model"]["merges"]  # type: ignore[no-any-return]


@cache
def whisper(directory: Path) -> Path:
    """Write the checkpoint."""
    tokenizer = _tokenizer(directory)
    ids = tokenizer.convert_tokens_to_ids
    end, start = ids("<|endoftext|>"), ids("<|startoftranscript|>")
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=16,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=STATES,
        max_target_positions=MAX_TOKENS,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(7)
    model = randomized(WhisperForConditionalGeneration(config)).eval()
    values: dict[str, Any] = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
        "max_length": MAX_TOKENS,
        "is_multilingual": True,
        "lang_to_id": {f"<|{each}|>": ids(f"<|{each}|>") for each in LANGUAGES},
        "task_to_id": {"transcribe": ids("<|transcribe|>"), "translate": ids("<|translate|>")},
        "no_timestamps_token_id": ids("<|notimestamps|>"),
        "prev_sot_token_id": ids("<|startofprev|>"),
        "max_initial_timestamp_index": 50,
        "suppress_tokens": list(SUPPRESSED),
        "begin_suppress_tokens": [tokenizer.encode(BLANK, add_special_tokens=False)[0], end],
        "return_timestamps": False,
        "alignment_heads": [[1, 0], [2, 3], [2, 1]],
    }
    model.generation_config = GenerationConfig(**values)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    WhisperFeatureExtractor(feature_size=16, chunk_length=CLIP_S).save_pretrained(directory)
    return directory


class WhisperOracle:
    """transformers' modules and logits processors, token by token.

    Its `generate` cuts a clip at the timestamps of the output, which random weights draw anywhere.
    """

    def __init__(self, directory: Path) -> None:
        model = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
        self.model: Any = model.eval()
        self.config: Any = GenerationConfig.from_pretrained(directory)
        extract: Any = WhisperFeatureExtractor.from_pretrained(directory)
        # in numpy, as without torch: greedy tokens of random weights flip at other roundings
        extract._torch_extract_fbank_features = extract._np_extract_fbank_features
        self.extract = extract
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def states(self, samples: Any) -> torch.Tensor:
        """[length, hidden] of the encoder."""
        features = self.extract(samples, sampling_rate=16000, return_tensors="pt").input_features
        with torch.no_grad():
            return self.model.model.encoder(features).last_hidden_state[0]  # type: ignore[no-any-return]

    def language(self, states: torch.Tensor) -> str:
        """Return the language of a clip."""
        encoded = BaseModelOutput(last_hidden_state=states[None])
        ids = self.model.detect_language(encoder_outputs=encoded, generation_config=self.config)
        return str(self.tokenizer.convert_ids_to_tokens(ids)[0]).strip("<|>")

    def prompt(self, language: str, task: str, *, timed: bool) -> list[int]:
        """Without text before the clip."""
        config = self.config
        ids = [config.decoder_start_token_id, config.lang_to_id[f"<|{language}|>"]]
        ids.append(config.task_to_id[task])
        return ids if timed else [*ids, config.no_timestamps_token_id]

    def tokens(
        self, states: torch.Tensor, prompt: list[int], most: int = MAX_TOKENS, *, timed: bool
    ) -> list[int]:
        """Greedy, without the end token."""
        config, begin, output = self.config, len(prompt), list[int]()
        processors: list[Any] = [
            SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin_index=begin),
            SuppressTokensLogitsProcessor(config.suppress_tokens),
        ]
        if timed:
            processors.append(WhisperTimeStampLogitsProcessor(config, begin_index=begin))
        cache, given = None, prompt
        while len(prompt) + len(output) < most:
            with torch.no_grad():
                out = self.model(
                    encoder_outputs=(states[None],),
                    decoder_input_ids=torch.tensor([given]),
                    past_key_values=cache,
                    use_cache=True,
                )
            scores, cache = out.logits[:, -1].float(), out.past_key_values
            for process in processors:
                scores = process(torch.tensor([prompt + output]), scores)
            token = int(scores.argmax())
            if token == config.eos_token_id:
                break
            output.append(token)
            given = [token]
        return output

    def ends_s(
        self, states: torch.Tensor, prompt: list[int], output: list[int], seconds: float
    ) -> list[float]:
        """Where transformers says that each token of the output ends."""
        model, ids = self.model, torch.tensor([prompt + output])
        model.set_attn_implementation("eager")
        with torch.no_grad():
            found = model(
                encoder_outputs=(states[None],), decoder_input_ids=ids, output_attentions=True
            )
        times = model._extract_token_timestamps(
            ModelOutput(cross_attentions=[found.cross_attentions], sequences=ids),
            self.config.alignment_heads,
            num_frames=round(seconds * 100),
            num_input_ids=len(prompt),
        )
        return times[0, len(prompt) : -1].tolist()  # type: ignore[no-any-return]

    def words(
        self, output: list[int], ends_s: list[float], language: str
    ) -> list[tuple[str, float, float]]:
        """transformers' words of an output with timestamps."""
        found: list[tuple[str, float, float]] = []
        ids: list[int] = []
        times: list[tuple[float, float]] = []
        for place, token in enumerate([*output, END]):
            if token < END:
                ids.append(token)
                times.append((ends_s[place - 1] if place else 0.0, ends_s[place]))
            elif ids:
                words = _collate_word_timestamps(self.tokenizer, ids, times, language, False)
                found += [(each["text"].strip(), *each["timestamp"]) for each in words]
                ids, times = [], []
        return [each for each in found if each[0]]

    def text(self, ids: list[int]) -> str:
        """Without special tokens and timestamps."""
        return str(self.tokenizer.decode([token for token in ids if token < END]))
