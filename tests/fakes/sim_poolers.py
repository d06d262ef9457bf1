"""A mesh in a thread of this process that serves an embedder and a scorer with the sim engine."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import write_json
from tests.servers import Server, bus_settings_of, free_port, redis_settings_of
from tokenmesh.services.gateway.main import build as build_gateway
from tokenmesh.services.scheduler_svc.main import build as build_scheduler
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.services.worker_svc.main import build as build_worker
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

_LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789"]
_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, *(f"##{c}" for c in _LETTERS)]
_SIZES = {
    "model_type": "bert",
    "vocab_size": len(_WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}


def _write_checkpoint(directory: Path, architecture: str, **values: object) -> None:
    """Write the files that the sim engine and the tokenizer read: no weights."""
    directory.mkdir()
    (directory / "vocab.txt").write_text("\n".join(_WORDS), encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "config.json", {"architectures": [architecture], **_SIZES, **values})


@contextmanager
def sim_poolers(folder: Path, nats: Server, redis: Server) -> Iterator[str]:
    """The address of a gateway with the models `all-minilm` and `reranker`."""
    _write_checkpoint(folder / "embedder", "BertModel")
    labels = {"id2label": {"0": "relevance"}, "label2id": {"relevance": 0}}
    _write_checkpoint(folder / "scorer", "BertForSequenceClassification", **labels)
    models = (
        ModelSettings(model=str(folder / "embedder"), served_model_name=("all-minilm",)),
        ModelSettings(model=str(folder / "scorer"), served_model_name=("reranker",)),
    )
    settings = Settings(
        models=models,
        bus=bus_settings_of(nats),
        redis=redis_settings_of(redis),
        gateway=GatewaySettings(port=free_port()),
        worker=WorkerSettings(engine="sim"),
    )
    ready: Future[Callable[[], object]] = Future()
    # `run` cancels what is left before it closes the loop.
    thread = threading.Thread(target=lambda: asyncio.run(_serve(settings, ready)))
    thread.start()
    try:
        end = ready.result(60)
        try:
            yield f"127.0.0.1:{settings.gateway.port}"
        finally:
            end()
    finally:
        thread.join(30)


async def _serve(settings: Settings, ready: "Future[Callable[[], object]]") -> None:
    """Run the services until the function is called that `ready` gets."""
    first, second = settings.models
    alone = [settings.model_copy(update={"models": (each,)}) for each in (first, second)]
    end = asyncio.Event()
    try:
        async with AsyncExitStack() as stack:
            for service, used, build in (
                ("worker", alone[0], build_worker),
                ("worker", alone[1], build_worker),
                ("scheduler", settings, build_scheduler),
                ("tokenizer", settings, build_tokenizer),
                ("gateway", settings, build_gateway),
            ):
                await stack.enter_async_context(running(service, used, build))
            await asyncio.sleep(0.5)
            ready.set_result(partial(asyncio.get_running_loop().call_soon_threadsafe, end.set))
            await end.wait()
    except BaseException as error:
        if not ready.done():
            ready.set_exception(error)
        raise
