"""The pool of threads: every chunk runs once, from any thread and in any number of calls."""

import ctypes
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from tests.ops.native import FOLDER, needs_native
from tokenmesh.kernels.native import NativeWeight, build, native_linear
from tokenmesh.kernels.native.start import library

pytestmark = needs_native


def _layer() -> tuple[torch.Tensor, NativeWeight, torch.Tensor]:
    torch.manual_seed(0)
    weight, x = torch.randn(1024, 128), torch.randn(16, 128)
    packed = NativeWeight.pack(weight, None)
    return x, packed, native_linear(x, packed)


def test_thousands_of_short_pieces_are_all_done() -> None:
    x, packed, expected = _layer()
    for _ in range(5000):
        assert torch.equal(native_linear(x, packed), expected)


def test_threads_that_ask_at_the_same_time_all_get_their_answer() -> None:
    x, packed, expected = _layer()
    wrong: list[torch.Tensor] = []

    def ask() -> None:
        answers = (native_linear(x, packed) for _ in range(500))
        wrong.extend(answer for answer in answers if not torch.equal(answer, expected))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_the_pool_grows_and_never_shrinks() -> None:
    before = library().tm_pool_threads()
    assert library().tm_pool_start(ctypes.c_int(1), ctypes.c_long(0)) == before
    assert before >= 3


def test_another_clone_finds_what_was_compiled_of_the_same_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clone = shutil.copytree(build._HERE, tmp_path / "clone")
    monkeypatch.setattr(build, "_HERE", clone)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    build.load(FOLDER)
    (clone / "rows.c").write_text((clone / "rows.c").read_text() + "\n")
    with pytest.raises(build.NativeUnavailable, match="false"):
        build.load(FOLDER)


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    with pytest.raises(build.NativeUnavailable, match="false"):
        build.load(tmp_path)


def test_a_compiler_that_does_not_know_amx_compiles_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def compiled(folder: Path, name: str) -> Path:
        asked.append(name)
        if "AMX" in name:
            raise subprocess.CalledProcessError(1, "cc", stderr="unknown option -mamx-tile")
        return made

    made = build.compiled(FOLDER.expanduser(), "AVX2")
    monkeypatch.setattr(build, "level", lambda: "AVX-512 with AMX")
    monkeypatch.setattr(build, "compiled", compiled)
    assert build.load(tmp_path).tm_has_amx() == 0
    assert asked == ["AVX-512 with AMX", "AVX-512 with VBMI"]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.NativeUnavailable, match="no C compiler"):
        build.load(tmp_path)


def test_a_folder_that_others_can_write_to_is_not_loaded_from(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(build.NativeUnavailable, match="written by other users"):
        build.load(folder)


@pytest.mark.parametrize(
    ("used", "lacks", "expected"),
    [
        ("AVX512", "", "AVX-512 with AMX"),
        ("AVX512", "amx_int8", "AVX-512 with VBMI"),
        ("AVX512", "avx512_vbmi", "AVX-512"),
        ("AVX512", "avx512_bf16", "AVX-512 without bfloat16"),
        ("AVX512", "avx512_vnni", "AVX2"),
        ("AVX2", "", "AVX2"),
        ("AVX2", "fma3", None),
        ("DEFAULT", "", None),
    ],
)
def test_the_processor_and_what_torch_uses_choose_the_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used: str, lacks: str, expected: str | None
) -> None:
    names = ["avx512_vbmi", "avx512_bf16", "avx512_vnni", "fma3", "f16c", "bmi2"]
    names += ["amx_tile", "amx_int8", "amx_bf16"]
    there = {name: name != lacks for name in names}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: there)
    if expected:
        assert build.level() == expected
    else:
        with pytest.raises(build.NativeUnavailable, match="no AVX2"):
            build.load(tmp_path)


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(self: Path) -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(build.NativeUnavailable, match="home"):
        build.load(Path("~/kernels"))
