"""run_mesh: start the servers, then the services, watch over them, and leave nothing behind."""

import asyncio
import json
import os
import shlex
import signal
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from tokenmesh.cli.api import DEFAULT_URL
from tokenmesh.cli.embedded.child import ChildSpec
from tokenmesh.cli.embedded.plan import (
    NOTIFY_SOCKET,
    MeshPlan,
    check_address,
    check_installed,
    check_models,
    check_store,
    make_plan,
    warn_if_open,
    warn_if_overfull,
)
from tokenmesh.cli.embedded.ports import check_free, free_port
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.cli.embedded.readiness import base_url, wait_ready
from tokenmesh.cli.embedded.screen import Screen
from tokenmesh.cli.embedded.supervisor import ProcessSupervisor
from tokenmesh.cli.embedded.watch import ProcessWatch, StoreWatch
from tokenmesh.shared.bus.message_bus import connect
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import changed
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import BusLost
from tokenmesh.shared.lifecycle import ExitCode, StopSignals
from tokenmesh.shared.messages.beat import ModelCard

STOP_MARGIN_S: Final = 5.0
"""Time for a process to leave beyond service.drain_grace_s; then it is killed."""


async def run_mesh(settings: Settings, screen: Screen, ready_fd: int | None = None) -> int:
    """Serve until a signal; the exit code. Raises ConfigError before anything has started.

    ready_fd: gets a byte when the mesh is ready, in place of the ready screen.
    """
    if settings.gateway.port == 0 and settings.gateway.uds is None:
        settings = changed(settings, {"gateway": {"port": free_port()}})
    check_installed()
    check_models(settings)
    check_address(settings)
    check_store(settings)
    gateway = settings.gateway
    if gateway.uds is None:
        check_free(gateway.host, gateway.port, is_shared=gateway.reuse_port)
    warn_if_open(gateway, screen)
    warn_if_overfull(settings, screen)
    stops = StopSignals()
    with private_folder() as folder, stops.installed():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stops.stop, "SIGHUP")
        plan = make_plan(settings, folder)

        def goes_on_without(spec: ChildSpec) -> bool:
            """Return whether a worker's model is one of several, of which another may run."""
            others = {each.model for each in plan.services} - {None, spec.model}
            failed = {each.model for each in supervisor.failed}
            return spec.model is not None and not settings.up.strict and bool(others - failed)

        supervisor = ProcessSupervisor(
            settings.up,
            screen.line,
            screen.restarting,
            screen.drained,
            screen.recovered,
            goes_on_without,
        )
        watch = ProcessWatch(settings.up, lambda: supervisor.children)
        with watch.listening(folder / NOTIFY_SOCKET):
            try:
                async with running("the watch over processes", watch.run(), screen):
                    return await _live(plan, supervisor, screen, stops, ready_fd)
            finally:
                screen.end_progress()
                grace_s = settings.service.drain_grace_s + STOP_MARGIN_S
                await supervisor.stop(grace_s, stops.second)


@asynccontextmanager
async def running(
    name: str, work: Coroutine[Any, Any, None], screen: Screen
) -> AsyncIterator[None]:
    """Do `work` during the block. Should it fail, the mesh goes on without it."""

    def warn(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            screen.warn(f"{name} has failed: {error!r}")

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(warn)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _live(
    plan: MeshPlan,
    supervisor: ProcessSupervisor,
    screen: Screen,
    stops: StopSignals,
    ready_fd: int | None,
) -> int:
    """Through start and service until something ends them."""
    screen.begin(plan.counts)
    stop = asyncio.create_task(stops.first.wait())
    starting = asyncio.create_task(_start(plan, supervisor, screen))
    try:
        done = await _first_of(plan.settings.up.ready_s, starting, stop, supervisor.dead)
        if starting in done:
            card = starting.result()
            supervisor.never_give_up()
            failed = {spec.model: death for spec, death in supervisor.failed.items() if spec.model}
            if ready_fd is None:
                _show_ready(plan, screen, card, failed)
            else:
                screen.end_progress()
                os.write(ready_fd, b"1")
            for model, death in failed.items():
                screen.failed(model, death)
            watching = _watch_store(plan, supervisor, screen)
            async with running("the watch over JetStream", watching, screen):
                done = await _first_of(None, stop, supervisor.dead)
    finally:
        starting.cancel()
        await asyncio.wait((starting,))
    if supervisor.dead in done:
        death = supervisor.dead.result()
        screen.dead(death)
        is_config = death.exit_code == ExitCode.BAD_CONFIG
        return ExitCode.BAD_CONFIG if is_config else ExitCode.CRASHED
    if stop in done:
        screen.note("stopping: running requests may finish, Ctrl-C again ends them")
        return ExitCode.CLEAN
    screen.warn(f"not ready after up.ready_s = {plan.settings.up.ready_s:.0f} s")
    return ExitCode.CRASHED


async def _start(plan: MeshPlan, supervisor: ProcessSupervisor, screen: Screen) -> ModelCard | None:
    await supervisor.start(plan.servers)
    await supervisor.start(plan.services)
    return await wait_ready(plan, screen.progress, supervisor.failed)


async def _watch_store(plan: MeshPlan, supervisor: ProcessSupervisor, screen: Screen) -> None:
    """As long as the mesh runs, see `StoreWatch`; a NATS that is joined is its operator's."""
    if plan.store is None:
        return
    bus = None
    while bus is None:
        with suppress(BusLost):
            bus = await connect(plan.settings.bus, "up")
    try:
        await StoreWatch(
            bus,
            plan.store,
            plan.settings.up,
            restart=partial(supervisor.kill, "nats"),
            warn=screen.warn,
        ).run()
    finally:
        await bus.close()


async def _first_of(
    timeout_s: float | None, *waits: "asyncio.Future[Any]"
) -> set["asyncio.Future[Any]"]:
    done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return done


_QUESTION: Final = "What is the capital of Japan?"
"""Also the built-in model knows the answer."""
_EXAMPLES: Final[dict[str, tuple[str, dict[str, object]]]] = {
    "embed": ("/v1/embeddings", {"input": _QUESTION}),
    "score": ("/score", {"text_1": _QUESTION, "text_2": ["Tokyo", "42"]}),
    "classify": ("/classify", {"input": _QUESTION}),
    "token_embed": ("/pooling", {"task": "token_embed", "input": _QUESTION}),
    "token_classify": ("/pooling", {"task": "token_classify", "input": _QUESTION}),
}
"""Route and body of a request for each task of a model that does not generate."""
_CHAT: Final[tuple[str, dict[str, object]]] = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": _QUESTION}]},
)


def _show_ready(
    plan: MeshPlan, screen: Screen, card: ModelCard | None, failed: Collection[str]
) -> None:
    settings = plan.settings
    url = base_url(settings.gateway)
    where = "" if url == DEFAULT_URL else f" --url {url}"
    chats = card is None or (card.generates and not card.only_transcribes)
    models = [model for model in settings.models if model.name not in failed]
    served = [model.name for model in models]
    facts = {
        "API": f"{url}/v1",
        "Docs": f"{url}/docs",
        "Model": ", ".join(map(_names, models)),
        **({"Chat": f"tokenmesh chat{where}"} if chats else {}),
        "Console": f"{url}/console  (in a browser: chat, and where the time of each request goes)",
        "Trace": f"tokenmesh trace{where}",
        "Stop": "Ctrl-C",
    }
    if sampling := "; ".join(filter(None, map(_sampling, models))):
        facts["Sampling"] = f"{sampling}, where a request does not say"
    if card is not None and card.host_kv_bytes:
        bound = f"{card.host_kv_bytes / (1 << 30):.1f} GiB (--kv-cache-memory-bytes)"
        facts["Memory"] = f"a worker's KV cache grows with use, up to {bound}"
    if plan.events_url is not None:
        facts["Events"] = f"the NATS URL for block events is in {plan.events_url}"
    key = (
        '  -H "Authorization: Bearer $API_KEY" \\\n'
        if settings.gateway.api_key_hashes or settings.gateway.keys_file
        else ""
    )
    uds = settings.gateway.uds
    program = "curl" if uds is None else f"curl --unix-socket {uds}"
    path, words = example_request(card, served[0])
    screen.ready(facts, f"{program} {url}{path} \\\n{key}  {words}")


def _names(model: ModelSettings) -> str:
    """A model's name, and the others that requests may use."""
    others = ", ".join(model.served_model_name[1:])
    return f"{model.name} ({others})" if others else model.name


def _sampling(model: ModelSettings) -> str:
    """Return what the settings say about sampling; empty: nothing."""
    values = model.override_generation_config
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    return f"{model.name}: {shown}" if values else ""


def example_request(card: ModelCard | None, model: str) -> tuple[str, str]:
    """The route of a request that the model answers, and what curl sends."""
    if card is not None and card.only_transcribes:
        return "/v1/audio/transcriptions", f"-F model={shlex.quote(model)} -F file=@speech.wav"
    tasks = () if card is None or card.generates else card.tasks
    path, body = next((_EXAMPLES[task] for task in tasks), _CHAT)
    request = json.dumps({"model": model, **body})
    return path, f"-H 'Content-Type: application/json' \\\n  -d '{request}'"
