"""Keys of config.json and generation_config.json whose values would change what is computed.

A key that is read or that changes nothing is not here; a test holds all that transformers reads
against these tables.
"""

from collections.abc import Mapping
from typing import Any, Final

from tokenmesh.services.worker_svc.models.raw_config import RawConfig

CONFIG: Final[Mapping[str, Any]] = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "per_layer_config": None,
    "attention_chunk_size": None,
    "kv_sharing_modes": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Of config.json, with the only value besides null that is accepted where a family ignores it."""

GENERATION: Final[Mapping[str, Any]] = {
    "min_length": 0,
    "min_new_tokens": 0,
    "stop_strings": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "renormalize_logits": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "token_healing": False,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "diversity_penalty": 0.0,
    "constraints": None,
    "force_words_ids": None,
}
"""Of generation_config.json, in the same way."""


def refuse(raw: RawConfig, keys: Mapping[str, Any], advice: str = "") -> None:
    """Raise CheckpointError for the first of the keys that nothing has read and that is set."""
    for key, neutral in keys.items():
        value = raw.values.get(key)
        if key in raw.read or value is None or value in ([], {}) or value == neutral:
            continue
        raise raw.error(key, f"is {value!r}, which is not supported{advice}")
