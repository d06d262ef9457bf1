"""Who can be measured, and how each is started."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.bus_round_trip import open_round_trip
from benchmarks.peers.child import start_child
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.http_peer import MODEL, HttpPeer
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.sample import Measure
from benchmarks.serve.own_mesh import own_mesh
from benchmarks.serve.own_server import own_server

MAX_MODEL_LEN: Final = 2304
_VLLM_KV_GIB: Final = 2
_WARMING: Final = 10
"""Round trips before one that counts as warm."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The input of every peer."""

    checkpoint: Path
    """Its folder; the peers' logs go there too."""
    threads: int
    timeout_s: float
    """For one answer, and for a start."""
    vllm_python: Path | None
    llama_bench: Path | None
    """llama.cpp's `llama-batched-bench`."""

    def log(self, name: str) -> Path:
        """The file to which a peer's output goes."""
        return self.checkpoint / f"{name}.log"

    @property
    def environment(self) -> dict[str, str]:
        """For a torch program: all threads, spinning as the library likes it."""
        plain = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("OMP_", "GOMP_", "KMP_"))
        }
        # libgomp's own default: importing a module of this repository sets 0.
        spinning = {"GOMP_SPINCOUNT": "300000"}
        return {**plain, **spinning, "OMP_NUM_THREADS": str(self.threads)}


Open = Callable[[Setting, AsyncExitStack], Awaitable[Measure]]


async def open_mesh(setting: Setting, stack: AsyncExitStack) -> Measure:
    """All services, over HTTP. It is not frozen between its turns: its beats must go on."""
    arguments = [str(setting.checkpoint), "--served-model-name", MODEL, "--dtype", "bfloat16"]
    arguments += ["--no-enable-prefix-caching", "--max-model-len", str(MAX_MODEL_LEN)]
    chosen = {"TOKENMESH_WORKER__CPU_THREADS": str(setting.threads)}
    url = await stack.enter_async_context(own_mesh(arguments, chosen, setting.log("mesh")))
    return HttpPeer(url, setting.timeout_s).measure


async def open_engine(setting: Setting, stack: AsyncExitStack) -> Measure:
    """Our engine in one process, without a bus."""
    environment = {**setting.environment, "GOMP_SPINCOUNT": "0"}
    return await _child(setting, stack, "engine_child", [], environment)


async def open_bus(_setting: Setting, stack: AsyncExitStack) -> Measure:
    """A round trip over NATS, in place of an engine."""
    return await open_round_trip(stack)


async def open_warm_bus(_setting: Setting, stack: AsyncExitStack) -> Measure:
    """The same right after others like it."""
    return await open_round_trip(stack, num_before=_WARMING)


async def open_generate(setting: Setting, stack: AsyncExitStack) -> Measure:
    """transformers.generate, a static batch."""
    return await _child(setting, stack, "transformers_child", ["generate"], setting.environment)


async def open_continuous(setting: Setting, stack: AsyncExitStack) -> Measure:
    """transformers' continuous batching."""
    return await _child(setting, stack, "transformers_child", ["continuous"], setting.environment)


async def open_vllm(setting: Setting, stack: AsyncExitStack) -> Measure:
    """vLLM's CPU build over HTTP, which binds its threads itself: all cores but one."""
    return await _vllm(setting, stack, "vllm", {})


async def open_vllm_all_cores(setting: Setting, stack: AsyncExitStack) -> Measure:
    """The same with as many threads as the others have."""
    bind = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}"}
    return await _vllm(setting, stack, "vllm_all_cores", bind)


async def _vllm(
    setting: Setting, stack: AsyncExitStack, name: str, chosen: dict[str, str]
) -> Measure:
    if setting.vllm_python is None:
        raise RuntimeError("not installed here (--vllm-python)")
    command = [str(setting.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(setting.checkpoint), "--served-model-name", MODEL]
    command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--no-enable-prefix-caching", "--host", "127.0.0.1"]
    environment = {**setting.environment, **chosen, "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB)}
    del environment["OMP_NUM_THREADS"]
    server = await stack.enter_async_context(
        own_server(command, "/health", environment, setting.log(name), setting.timeout_s)
    )
    os.killpg(server.pid, signal.SIGSTOP)
    return HttpPeer(server.url, setting.timeout_s, server.pid).measure


async def open_llama_cpp(setting: Setting, _stack: AsyncExitStack) -> Measure:
    """llama.cpp, without HTTP."""
    if setting.llama_bench is None:
        raise RuntimeError("not installed here (--llama-bench)")
    file = setting.checkpoint / "model.gguf"
    await asyncio.to_thread(write_gguf, setting.checkpoint, file)
    return LlamaCpp(
        setting.llama_bench, file, setting.threads, setting.environment, setting.timeout_s
    ).measure


async def _child(
    setting: Setting,
    stack: AsyncExitStack,
    module: str,
    arguments: list[str],
    environment: dict[str, str],
) -> Measure:
    child = await stack.enter_async_context(
        start_child(
            f"benchmarks.peers.{module}",
            [*arguments, str(setting.checkpoint), str(setting.threads)],
            environment,
            setting.log("_".join([module, *arguments])),
            setting.timeout_s,
        )
    )
    return child.measure


PEERS: Final[dict[str, Open]] = {
    "mesh": open_mesh,
    "engine": open_engine,
    "bus": open_bus,
    "warm-bus": open_warm_bus,
    "generate": open_generate,
    "continuous": open_continuous,
    "vllm": open_vllm,
    "vllm-all-cores": open_vllm_all_cores,
    "llama.cpp": open_llama_cpp,
}
TITLES: Final = {
    "mesh": "TokenMesh over HTTP",
    "engine": "its engine in-process",
    "bus": "a bare round trip over NATS",
    "warm-bus": "the same without a pause before it",
    "generate": "transformers.generate",
    "continuous": "transformers continuous batching",
    "vllm": "vLLM's CPU build over HTTP",
    "vllm-all-cores": "the same, bound to all cores",
    "llama.cpp": "llama.cpp, without HTTP",
}
