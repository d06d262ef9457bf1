"""Rotary positions: RopeConfig, and the angles of each kind as transformers 5 computes them."""

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch

from tokenmesh.kernels.dispatch import uses_triton

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of rotary positions. Unused fields keep their neutral values."""

    kind: RopeKind
    theta: float
    rotary_dim: int
    max_position: int
    """max_position_embeddings of the checkpoint."""
    original_max_position: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def boundary(self) -> int | None:
        """Sequences longer than this turn all of their keys by other factors than shorter ones."""
        return self.original_max_position if self.kind == "longrope" else None

    def cache_salt(self, salt: str | None, num_prompt: int) -> str | None:
        """The prefix cache's salt of a prompt: its own, and its length where keys depend on it."""
        is_plain = salt is None and num_prompt <= self.max_position
        if self.kind != "dynamic" or is_plain:
            return salt
        return f"length {max(num_prompt, self.max_position)}: {salt or ''}"


_FIRST_TABLE: Final = 4096
"""Positions of a rope's first table."""


class Rotary:
    """Turns positions into the complex factors that `kernels.rope.rotate` multiplies with."""

    def __init__(
        self,
        config: RopeConfig,
        device: torch.device | None = None,
        frequencies: torch.Tensor | None = None,
    ) -> None:
        """device is where positions will be; default: CPU.

        frequencies, float32 [pairs], replace those that the config yields.
        """
        self._config = config
        if frequencies is None:
            frequencies = inverse_frequencies(config)
        self._frequencies = frequencies.to(device)
        self._long = None
        if config.kind == "longrope":
            self._long = _longrope(config, config.long_factor).to(device)
        self._table = torch.empty(0, 1, config.rotary_dim // 2, dtype=torch.complex64)

    def turns(self, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """positions [T] -> [T, 1, pairs] complex64.

        lengths [T] is the length of the sequence that each token was first computed in, for kinds
        that depend on it (dynamic, longrope). It does not depend on chunks; rows compute all keys
        again where they cross the boundary of longrope, so that one row never mixes its factors.
        """
        return self._turned(positions, self._at_length(lengths))

    @property
    def config(self) -> RopeConfig:
        return self._config

    @property
    def has_table(self) -> bool:
        """Return whether a position is turned alike in sequences of any length."""
        return self._config.kind not in ("dynamic", "longrope")

    def table(self, num_positions: int) -> torch.Tensor:
        """The turns of at least the first positions, on a CPU: [*, 1, pairs].

        Kept from step to step, and made twice as long when a sequence outgrows it.
        """
        assert self.has_table
        if num_positions > len(self._table):
            size = max(_FIRST_TABLE, 2 * len(self._table), num_positions)
            self._table = self._turned(torch.arange(size), self._frequencies)
        return self._table

    def _turned(self, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        angle = positions.unsqueeze(1).float() * frequencies
        scale = self._config.attention_factor
        return torch.complex(angle.cos() * scale, angle.sin() * scale).unsqueeze(1)

    def _at_length(self, lengths: torch.Tensor) -> torch.Tensor:
        config = self._config
        if config.kind == "dynamic" and _may_exceed(lengths, config.max_position):
            return _dynamic(config, lengths)
        if self._long is not None and _may_exceed(lengths, config.original_max_position):
            is_long = (lengths > config.original_max_position).unsqueeze(1)
            return torch.where(is_long, self._long, self._frequencies)
        return self._frequencies


def _may_exceed(lengths: torch.Tensor, bound: int) -> bool:
    """Return whether a length is above the bound; always where one had to wait for the answer."""
    return uses_triton(lengths) or int(lengths.max()) > bound


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """[pairs] float32 for sequences within the original length."""
    if config.kind == "longrope":
        return _longrope(config, config.short_factor)
    frequencies = 1.0 / (config.theta ** _exponents(config.rotary_dim))
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "yarn":
        return _yarn(config)
    return frequencies


def _exponents(rotary_dim: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim


def _longrope(config: RopeConfig, factors: tuple[float, ...]) -> torch.Tensor:
    ramp = config.theta ** _exponents(config.rotary_dim)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * ramp)


def _dynamic(config: RopeConfig, lengths: torch.Tensor) -> torch.Tensor:
    """[T, pairs]: the base grows with the part of the sequence past the original length."""
    dim = config.rotary_dim
    length = lengths.clamp(min=config.max_position).unsqueeze(1)
    growth = (config.factor * length / config.max_position) - (config.factor - 1)
    # in float32 a power depends in its last bit on how many are computed together
    base = config.theta * (growth.double() ** (dim / (dim - 2))).float()
    return 1.0 / (base ** _exponents(dim, lengths.device))


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    length = config.original_max_position
    wave = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    slowed = torch.where(wave > length / low, frequencies / config.factor, frequencies)
    smooth = (length / wave - low) / (high - low)
    blended = (1 - smooth) * slowed / config.factor + smooth * slowed
    is_between = (wave >= length / high) & (wave <= length / low)
    return torch.where(is_between, blended, slowed)


def _yarn(config: RopeConfig) -> torch.Tensor:
    """Blend of extrapolated (short waves) and interpolated (long waves) frequencies."""
    dim = config.rotary_dim

    def pair_with(rotations: float) -> float:
        """The pair that turns `rotations` times over the original length."""
        waves = config.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(waves) / (2 * math.log(config.theta))

    low, high = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = config.theta ** _exponents(dim)
    kept = 1 - ramp
    # 1 - kept is not always ramp in float32; transformers' order keeps angles equal at 100k.
    return 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept
