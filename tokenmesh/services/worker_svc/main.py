"""Process entry of worker_svc."""

import asyncio
import gc
import logging
import signal
from functools import partial

import msgspec

from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.proposing import Proposer
from tokenmesh.engine.kv.block_log import BlockLog
from tokenmesh.engine.kv.make_cache import has_prefix_cache
from tokenmesh.engine.models.location import locate_tokenizer
from tokenmesh.engine.speculate.lookup import LookupProposer
from tokenmesh.engine.speculate.proposer import make_proposer
from tokenmesh.services.worker_svc.actor import WorkerActor, WorkerContext
from tokenmesh.services.worker_svc.adapters.actor import AdaptersActor
from tokenmesh.services.worker_svc.adapters.directories import AdapterDirectories
from tokenmesh.services.worker_svc.adapters.store import AdapterStore
from tokenmesh.services.worker_svc.adapters.sync import AdapterSync
from tokenmesh.services.worker_svc.block_events.actor import BlockEventsActor
from tokenmesh.services.worker_svc.block_events.stream import BlockEventStream
from tokenmesh.services.worker_svc.encoded_rows import with_fitting_rows
from tokenmesh.services.worker_svc.grammar.compiler import GrammarCompiler
from tokenmesh.services.worker_svc.intake import Identity
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.services.worker_svc.loaded import Loaded, load
from tokenmesh.services.worker_svc.on_demand import LEVEL, OnDemand
from tokenmesh.services.worker_svc.prefix_index.writer import IndexWriter
from tokenmesh.services.worker_svc.thread import EngineThread
from tokenmesh.shared import subjects
from tokenmesh.shared.adapter_registry import AdapterRegistry
from tokenmesh.shared.allocator import give_back_after_loading
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.environment import rank_place
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.speculative import SpeculativeConfig
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, WorkerId
from tokenmesh.shared.logs import start_logging
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.media import AUDIO, IMAGE
from tokenmesh.shared.service import Mesh, run_service

logger = logging.getLogger(__name__)


async def build(mesh: Mesh) -> None:
    """Load the model, start its engine, listen on this worker's own subjects."""
    model = choose_model(mesh.settings)
    settings = await asyncio.to_thread(with_fitting_rows, model, mesh.settings.worker)
    loaded = await load_in_turn(model, settings, on_demand := on_demand_of(mesh, model))
    grammars = await asyncio.to_thread(grammars_of, model, loaded, settings, mesh.blobs)
    # the loaded model stays in memory: exclude it from garbage collection
    await asyncio.to_thread(give_back_after_loading)
    gc.freeze()
    worker_id = WorkerId(mesh.instance_id)
    names = tuple(ModelName(name) for name in model.served_model_name or (model.name,))
    route_tokens = mesh.settings.tokenizer.route_block_tokens
    has_cache = has_prefix_cache(settings, loaded.runner)
    adapters = await load_adapters(settings.lora, loaded)
    block_events = block_events_of(mesh, worker_id, names[0], has_cache=has_cache)
    log = BlockLog() if block_events is not None else None
    proposer = make_proposer(model.speculative_config, loaded.runner)
    actor = WorkerActor(
        Identity(worker_id, mesh.epoch, names),
        settings,
        loaded,
        EngineThread(Engine(loaded.runner, settings, route_tokens, log, proposer), settings),
        WorkerContext(
            bus=mesh.bus,
            blobs=mesh.blobs,
            metrics=mesh.metrics,
            is_alive=partial(is_alive, mesh),
            leave=partial(signal.raise_signal, signal.SIGTERM),
            beat=mesh.beat_now,
            index=index_of(mesh, names[0]),
            grammars=grammars,
            block_events=block_events,
            adapters=adapters,
            on_demand=on_demand,
            transfer=await start_transfer(settings, loaded, mesh.settings.bus.url),
        ),
    )
    if block_events is not None:
        await mesh.listen(BlockEventsActor(block_events), subjects.worker_blocks(worker_id))
    await listen_as(mesh, worker_id, actor, loaded)
    card = card_of(names, loaded, settings.block_size if has_cache else 0, on_demand)
    card = with_drafts(card, model.speculative_config, proposer)
    card = with_kv(card, settings, loaded)
    if grammars is not None and settings.grammar_prestart and on_demand is None:
        # not earlier: the imports of these processes would delay the first heartbeats
        grammars.start(after=mesh.ready).add_done_callback(lambda _: gc.freeze())
    mesh.set_beat(lambda: ([card_now(card, adapters)], actor.load()))
    mesh.on_drain(actor.drain)
    if adapters is not None:
        await listen_for_adapters(mesh, names[0], adapters)


def on_demand_of(mesh: Mesh, model: ModelSettings) -> OnDemand | None:
    """None for a model that stays awake."""
    if not model.on_demand:
        return None
    labels = {"model_name": model.name, "engine": str(mesh.instance_id)}
    sleeps = mesh.metrics.counter("on_demand_sleeps", **labels)
    return OnDemand(model, mesh.settings.worker.on_demand, sleeps.inc)


async def load_in_turn(
    model: ModelSettings, settings: WorkerSettings, on_demand: OnDemand | None
) -> Loaded:
    """Load the model. One on demand waits until memory may be taken, and sleeps afterwards."""
    if on_demand is None:
        return await load(model, settings)
    await on_demand.wait_for_slot()
    loaded = await load(model, settings)
    await asyncio.to_thread(loaded.resident.sleep, LEVEL)
    on_demand.stays_asleep()
    return loaded


def block_events_of(
    mesh: Mesh, worker_id: WorkerId, model: ModelName, *, has_cache: bool
) -> BlockEventStream | None:
    """Publishes changes of the prefix cache, where block events are enabled."""
    limits, worker = mesh.settings.block_events, mesh.settings.worker
    if not limits.enabled:
        return None
    if not has_cache:
        logger.warning("no prefix cache: block events will consist of heartbeats only")
    return BlockEventStream(
        *(mesh.bus, model, worker_id, mesh.epoch, worker.block_size, limits, mesh.metrics),
        worker.kv_code,
    )


async def load_adapters(settings: LoraSettings, loaded: Loaded) -> AdapterStore | None:
    """Those of the settings; None where adapters are off. Raises ConfigError."""
    if not settings.enable_lora:
        return None
    store = AdapterStore(settings, loaded.adapters, AdapterDirectories(settings))
    await store.load_modules()
    return store


async def listen_for_adapters(mesh: Mesh, model: ModelName, store: AdapterStore) -> None:
    """Take commands about adapters, and load those that the other workers have."""
    registry, worker_id = AdapterRegistry(mesh.redis, model), WorkerId(mesh.instance_id)
    sync = AdapterSync(store, registry, mesh.settings.worker.lora, mesh.beat_now)
    labels = {"model_name": str(model), "engine": str(worker_id)}
    actor = AdaptersActor(store, sync, mesh.beat_now, mesh.metrics, labels)
    await mesh.listen(actor, subjects.worker_adapters(worker_id))


def index_of(mesh: Mesh, model: ModelName) -> IndexWriter:
    """Reports the prefix cache to schedulers."""
    worker_id, settings = WorkerId(mesh.instance_id), mesh.settings.prefix_index
    return IndexWriter(mesh.redis, model, worker_id, mesh.epoch, settings, mesh.metrics)


def card_now(card: ModelCard, store: AdapterStore | None) -> ModelCard:
    """The card with the adapters of this moment."""
    if store is None:
        return card
    return msgspec.structs.replace(
        card, adapters=store.cards(), resolves_adapters=store.resolves, takes_adapters=True
    )


def choose_model(settings: Settings) -> ModelSettings:
    """The one model that this worker runs. Raises ConfigError."""
    wanted = settings.worker.model
    found = [each for each in settings.models if wanted in (None, each.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(each.name for each in settings.models) or "none"
    raise ConfigError(
        f"a worker runs one model: set worker.model to one of those listed in models ({names})",
        param="worker.model",
    )


def grammars_of(
    model: ModelSettings, loaded: Loaded, settings: WorkerSettings, blobs: Blobs
) -> GrammarCompiler | None:
    """Return what structured output needs; None for an engine or a tokenizer without it. Blocks."""
    if not loaded.has_grammars or not loaded.eos_token_ids:
        return None
    try:
        file = locate_tokenizer(model)
    except CheckpointError as error:
        logger.warning("no structured output: %s", error.message)
        return None
    return GrammarCompiler(file, loaded.vocab_size, loaded.eos_token_ids, settings, blobs)


def card_of(
    names: tuple[ModelName, ...],
    loaded: Loaded,
    block_size: int = 0,
    on_demand: OnDemand | None = None,
) -> ModelCard:
    """The worker's model card. `block_size`: see `ModelCard`."""
    kv, images = loaded.kv_bytes, loaded.runner.images
    return ModelCard(
        name=names[0],
        aliases=list(names[1:]),
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        created_s=wall_s(),
        takes_images=IMAGE in loaded.media.kinds,
        hidden_size=loaded.hidden_size,
        eos_token_ids=sorted(loaded.eos_token_ids),
        block_size=block_size,
        generates=loaded.pooling is None,
        tasks=list(loaded.pooling.tasks) if loaded.pooling else [],
        pooled_size=loaded.pooling.size if loaded.pooling else 0,
        labels=list(loaded.pooling.labels) if loaded.pooling else [],
        takes_audio=AUDIO in loaded.media.kinds and not loaded.encoder_states,
        on_demand=on_demand is not None,
        slots="" if on_demand is None else on_demand.slots_name,
        weight_format=loaded.weight_format,
        ranks=loaded.num_ranks,
        stages=loaded.num_stages,
        host_kv_bytes=images.slots * images.num_bytes
        + (kv.block * loaded.runner.num_blocks if kv.is_on_host else 0),
        only_transcribes=bool(loaded.encoder_states),
        needs_encoder=bool(loaded.media.kinds),
        embeds_in_chunks=loaded.pooling is not None and loaded.pooling.in_chunks,
        max_embed_len=loaded.pooling.max_embed_len if loaded.pooling else 0,
    )


async def listen_as(mesh: Mesh, worker_id: WorkerId, actor: WorkerActor, loaded: Loaded) -> None:
    """Take streams or Pools, commands, and what readers of KV send."""
    taker = actor if loaded.pooling is None else actor.pooling()
    await mesh.listen(taker, subjects.worker_generate(worker_id))
    await mesh.listen(actor, subjects.worker_control(worker_id))
    if (for_readers := actor.for_readers()) is not None:
        await mesh.listen(for_readers, subjects.worker_kv(worker_id))


async def start_transfer(
    settings: WorkerSettings, loaded: Loaded, bus_url: str
) -> TransferProcess | None:
    """The process that moves KV to other workers and stores; None: none is moved. Raises
    ConfigError."""
    shared = loaded.shared_kv
    if shared is None:
        if settings.kv.role is not None:
            logger.warning("this worker exchanges no KV (kv.role is %s)", settings.kv.role)
        if settings.kv.has_stores:
            logger.warning("this worker keeps no KV elsewhere (kv.disk_dir, kv.mooncake_master)")
        return None
    settings.kv.check_encryption(bus_url)
    process = TransferProcess(shared.arena, settings.kv, shared.scope)
    await process.start()
    if "nixl" in settings.kv.used_transports:
        logger.warning("NIXL listens at addresses of its choice, without encryption or tokens")
    if "mooncake" in settings.kv.used_transports:
        logger.warning("Mooncake listens on all addresses, and lets any peer write KV")
    return process


def with_kv(card: ModelCard, settings: WorkerSettings, loaded: Loaded) -> ModelCard:
    """The card with what the worker does for others, and where its KV is."""
    shared = loaded.shared_kv
    if loaded.runner.images.slots:
        tiers = ["host", *(settings.kv.stores if shared is not None else ())]
        card = msgspec.structs.replace(card, kv_tiers=tiers)
    role = settings.kv.role
    if shared is None or role is None:
        return card
    return msgspec.structs.replace(card, kv_role=role, kv_scope=shared.scope)


def with_drafts(card: ModelCard, config: SpeculativeConfig, proposer: Proposer | None) -> ModelCard:
    """The card with where its drafts come from, if there are any."""
    takes_predictions = isinstance(proposer, LookupProposer)
    card = msgspec.structs.replace(card, takes_predictions=takes_predictions)
    if config.method is None:
        return card
    return msgspec.structs.replace(card, draft_method=config.method, max_drafts=config.max_drafts)


def is_alive(mesh: Mesh, gateway: GatewayId) -> bool:
    """Return whether heartbeats of a gateway arrive; True while not even the worker's own do."""
    hears_itself = mesh.members.get(mesh.instance_id) is not None
    return not hears_itself or mesh.members.get(InstanceId(gateway)) is not None


def run(settings: Settings) -> int:
    """Run until a signal; the exit code. The mesh does not know ranks that follow."""
    place = rank_place()
    if place is not None and place.rank > 0:
        # here: the leader and workers of one rank never need it
        from tokenmesh.engine.exec.follower import run as follow

        start_logging("worker", InstanceId(f"rank-{place.rank}"), settings.telemetry)
        return follow(place)
    return run_service("worker", settings, build)
