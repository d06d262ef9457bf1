"""Tiles of the experts' Triton kernels: which are read, chosen and written."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.kernels.interpreter import VARIABLE

pytest.importorskip("triton")

from tests.kernels.far_device import FarDevice
from tests.kernels.launches import Launches
from tokenmesh.kernels.dispatch import interpreted_on_cpu
from tokenmesh.kernels.moe import ExpertsSpec, experts, pack, triton_timer
from tokenmesh.kernels.moe.triton_tiles import (
    DEFAULT,
    PATH,
    Tile,
    Tiles,
    choose_tiles,
    device_key,
    for_float32,
    read_tiles,
    tiles_of,
    write_tiles,
)
from tokenmesh.kernels.moe.tune import BORDERS, ExpertsShape, TimeOf, choose, main, tune

SHAPE = ExpertsShape(experts=8, top_k=2, hidden=64, inner=32)


def test_the_file_has_tiles_for_any_number_of_rows_of_every_device() -> None:
    tiles = read_tiles()
    assert DEFAULT in tiles
    for entries in tiles.values():
        borders = [each.max_rows for each in entries]
        assert borders[-1] is None
        assert borders[:-1] == sorted(each for each in borders if each is not None)
        for each in entries:
            assert each.block_m in (16, 32, 64, 128)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tiles = {**read_tiles(), "A_Device": read_tiles()[DEFAULT]}
    write_tiles(tiles, tmp_path / "tiles.json")
    assert read_tiles(tmp_path / "tiles.json") == tiles


def test_tiles_are_chosen_by_the_rows_of_an_expert() -> None:
    few, many = read_tiles()[DEFAULT]
    assert few.max_rows is not None
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    assert choose_tiles(few.max_rows * 10, 10, x) == few
    assert choose_tiles(few.max_rows * 10 + 1, 10, x) == many
    assert choose_tiles(1, 10, x.float()) == for_float32(few)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "NVIDIA_H200"),
        ("NVIDIA H200 NVL", "NVIDIA_H200"),
        ("NVIDIA GH200 480GB", "NVIDIA_GH200_480GB"),
        ("NVIDIA_H100_80GB_HBM3", "NVIDIA_H100_80GB_HBM3"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA_A100-SXM4-80GB"),
    ],
)
def test_a_family_of_devices_has_one_name(name: str, key: str) -> None:
    assert device_key(name) == device_key(key) == key


def test_a_device_without_tiles_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "A Device")
    tiles_of.cache_clear()
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    for _ in range(2):
        assert choose_tiles(1, 1, x) == read_tiles()[DEFAULT][0]
    tiles_of.cache_clear()
    (record,) = caplog.records
    assert f"{PATH} has none for A_Device" in record.getMessage()


def cost(tiles: Tiles, border: int | None) -> float | None:
    """A device on which one tile is best, and eight warps do not fit."""
    if 8 in (tiles.first.num_warps, tiles.second.num_warps):
        return None
    height = 16 if border is not None and border <= 16 else 64
    first = abs(tiles.first.BLOCK_N - 128) + abs(tiles.first.num_stages - 4)
    second = abs(tiles.second.BLOCK_K - 128) + abs(tiles.second.BLOCK_N - 32)
    return abs(tiles.block_m - height) + first + second


def test_the_fastest_tiles_are_chosen() -> None:
    for border, height in ((4, 16), (None, 64)):

        def time_of(tiles: Tiles, border: int | None = border) -> float | None:
            return cost(tiles, border)

        found = choose(border, time_of)
        assert (found.max_rows, found.block_m) == (border, height)
        assert (found.first.BLOCK_N, found.first.num_stages, found.first.num_warps) == (128, 4, 4)
        assert (found.second.BLOCK_K, found.second.BLOCK_N, found.second.num_warps) == (128, 32, 4)


def test_a_device_that_nothing_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="no tile fits"):
        choose(4, lambda _: None)


def test_tuning_adds_a_device_and_keeps_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiles.json"
    write_tiles(read_tiles(), path)

    def timer_of(border: int | None) -> TimeOf:
        return lambda tiles: cost(tiles, border)

    tune(SHAPE, "A Device", path, timer_of)
    tiles = read_tiles(path)
    assert tiles[DEFAULT] == read_tiles()[DEFAULT]
    assert [each.max_rows for each in tiles["A_Device"]] == list(BORDERS)
    assert [each.block_m for each in tiles["A_Device"]] == [16, 16, 64, 64]
    assert capsys.readouterr().out.count("A_Device") == len(BORDERS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--experts", "8", "--top-k", "2", "--hidden", "64", "--inner", "32"])
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.skipif(os.environ.get(VARIABLE) == "1", reason="a process that interprets")
def test_the_timer_launches_the_tiles_that_it_is_given() -> None:
    def bench(run: Callable[[], torch.Tensor], return_mode: str) -> float:
        assert return_mode == "median"
        assert run().shape == (8, 32)
        return 1.5

    (tiles, _) = read_tiles()[DEFAULT]
    with FarDevice(), Launches() as launches, patch.object(triton_timer, "do_bench", bench):
        assert triton_timer.timer(8, 2, 4, 32, 48)(tiles) == 1.5
    by_name = {each.name: each.constants for each in launches.variants}
    assert by_name["first_kernel"]["BLOCK_M"] == by_name["second_kernel"]["BLOCK_M"] == 16
    assert by_name["first_kernel"]["BLOCK_K"] == tiles.first.BLOCK_K


def layouts() -> Iterator[ExpertsSpec]:
    yield ExpertsSpec(is_transposed=True)
    yield ExpertsSpec(is_interleaved=True)


def test_a_gpu_takes_packed_experts_only() -> None:
    x, ids, weights = torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    w13, w2 = torch.zeros(1, 32, 16), torch.zeros(1, 16, 16)
    for spec in layouts():
        stack = w13.transpose(1, 2) if spec.is_transposed else w13
        with interpreted_on_cpu(), pytest.raises(ValueError, match="must be packed"):
            experts(x, ids, weights, stack, w2, spec)
        straight = replace(spec, is_transposed=False, is_interleaved=False)
        pack(w13, w2, straight)


def test_tiles_of_float32_need_less_shared_memory() -> None:
    large = Tile(BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=5)
    small = for_float32(Tiles(None, 64, large, large))
    assert small.block_m == 64
    for tile in (small.first, small.second):
        rows = 64 + 2 * tile.BLOCK_N
        assert tile.num_stages * rows * tile.BLOCK_K * 4 < 100 << 10
