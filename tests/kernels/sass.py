"""Compile a kernel for Hopper without a GPU and read what the assembler made of it.

Triton keeps what it compiled in its cache, by the hash of the source, the target and its version;
what the disassembler prints is kept there too, by the hash of the machine code.
"""

import hashlib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from tests.kernels.case import Compilation

HOPPER: Final = GPUTarget("cuda", 90, 32)
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ +)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MachineCode:
    """One kernel for sm_90."""

    registers: int
    shared_bytes: int
    instructions: list[str]
    """Mnemonics with their modifiers, in order."""

    def count(self, pattern: str) -> int:
        """Instructions whose mnemonic begins with a match of the pattern."""
        expression = re.compile(pattern)
        return sum(expression.match(each) is not None for each in self.instructions)


def compile_for_hopper(compilation: Compilation) -> MachineCode:
    """Compile as the launcher would and take the machine code apart."""
    names = compilation.kernel.arg_names
    missing = set(names) ^ {*compilation.signature, *compilation.constants}
    assert not missing, f"{compilation.name}: arguments {missing}"
    source = ASTSource(
        compilation.kernel,
        {name: compilation.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(key),): value for key, value in compilation.constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]] for name in compilation.divisible_by_16
        },
    )
    options = {
        "num_warps": compilation.num_warps,
        "num_stages": compilation.num_stages,
        "enable_fp_fusion": True,
    }
    return machine_code_of(source, options)


def machine_code_of(source: ASTSource, options: Mapping[str, Any]) -> MachineCode:
    """Compile with options of a launch and take the machine code apart."""
    compiled = triton.compile(source, target=HOPPER, options=dict(options))
    text = _disassembled(compiled.asm["cubin"])
    registers = re.search(r"REG:(\d+)", text)
    assert registers is not None, text
    return MachineCode(int(registers[1]), compiled.metadata.shared, _INSTRUCTION.findall(text))


def _disassembled(cubin: bytes) -> str:
    """Resources and instructions of the kernel in a cubin, as `cuobjdump` prints them."""
    version = f"cuobjdump of Triton {triton.__version__}".encode()
    cache = get_cache_manager(hashlib.sha256(version + cubin).hexdigest())
    found = cache.get_file("kernel.sass")
    if found is None:
        found = cache.put(_cuobjdump(cubin), "kernel.sass", binary=False)
    return Path(found).read_text(encoding="utf-8")


def _cuobjdump(cubin: bytes) -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        result = subprocess.run(
            [_CUOBJDUMP, "-res-usage", "-sass", str(path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    return result.stdout
