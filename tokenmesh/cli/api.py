"""GatewayClient: the gateway as the command line sees it, over HTTP, with readable errors."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote

import httpx
import typer

from tokenmesh.shared.errors import NotFound, TokenMeshError, Unavailable

DEFAULT_URL: Final = "http://127.0.0.1:8000"
URL_VARIABLES: Final = ["TOKENMESH_URL", "OPENAI_BASE_URL"]
Url = Annotated[str, typer.Option(envvar=URL_VARIABLES, help="The gateway.")]
"""The option of all commands that talk to a mesh."""
_BASE_PATH: Final = "/v1"
"""With which clients of OpenAI name a server."""
_MAX_TRACES: Final = 500
_DATA: Final = "data:"
_DONE: Final = "[DONE]"
_TIMEOUT: Final = httpx.Timeout(10.0, read=300.0)
DIRECT: Final[Mapping[str, None]] = dict.fromkeys(
    ("all://127.0.0.1", "all://localhost", "all://[::1]")
)
"""Hosts that no proxy of the environment can reach: what httpx mounts for them."""


class ApiError(TokenMeshError):
    """The gateway refused; the message is its own."""


@dataclass(frozen=True)
class ChatDelta:
    """The part of an answer that one chunk of its stream adds."""

    request_id: str
    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    """Tokens of the whole answer, on the last chunk."""


class GatewayClient:
    """A connection to one gateway; a context manager."""

    def __init__(
        self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/").removesuffix(_BASE_PATH)
        self._client = httpx.Client(
            base_url=self._url,
            headers=headers,
            timeout=_TIMEOUT,
            transport=transport,
            mounts=DIRECT,
        )

    def __enter__(self) -> "GatewayClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def models(self) -> list[str]:
        """Names of the served models, at least one. Raises Unavailable."""
        models = self._get("/v1/models")["data"]
        if not models:
            raise Unavailable(f"{self._url} serves no model yet")
        return [str(each["id"]) for each in models]

    def draft_methods(self) -> dict[str, str]:
        """By model: where drafts of its tokens come from, and how many there may be."""
        found = {}
        for each in self._get("/v1/models").get("data", ()):
            config = each.get("speculative_config")
            if config:
                found[each["id"]] = f"{config['method']} {config['num_speculative_tokens']}"
        return found

    def trace(self, trace_id: str) -> dict[str, Any]:
        """A trace by its id or by the id of the request. Raises NotFound."""
        return self._get(f"/traces/{quote(trace_id, safe='')}")

    def traces(self) -> list[dict[str, Any]]:
        """Summaries of the newest traces, newest first."""
        return list(self._get(f"/traces?limit={_MAX_TRACES}")["traces"])

    def mesh(self) -> dict[str, Any]:
        """Every process of the mesh, as the gateway sees it."""
        return self._get("/mesh")

    def metrics(self) -> str | None:
        """Return the text of the gateway's metrics; None where the key may not read them."""
        with self._readable_errors():
            response = self._client.get("/metrics")
        return response.text if response.is_success else None

    def drain(self, process_id: str) -> None:
        """Drain a process. Raises NotFound with the known ids."""
        with self._readable_errors():
            response = self._client.post(f"/mesh/{quote(process_id, safe='')}/drain")
            if response.is_error:
                raise _error_of(response)

    def chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, object]
    ) -> Iterator[ChatDelta]:
        """The answer as it is made; closing the iterator cancels the request."""
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": model, "messages": messages, **options, **stream}
        with (
            self._readable_errors(),
            self._client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.is_error:
                response.read()
                raise _error_of(response)
            for line in response.iter_lines():
                data = line.removeprefix(_DATA).strip()
                if not line.startswith(_DATA) or data == _DONE:
                    continue
                yield _piece(json.loads(data))

    def _get(self, path: str) -> dict[str, Any]:
        with self._readable_errors():
            response = self._client.get(path)
            if response.is_error:
                raise _error_of(response)
            return dict(response.json())

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise Unavailable(
                f"no gateway answers at {self._url}: start one with `tokenmesh up`, or pass --url"
            ) from error
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ApiError(f"--url {self._url}: {error}", param="--url") from error
        except httpx.TransportError as error:
            raise Unavailable(
                f"the connection to {self._url} broke: {type(error).__name__} {error}"
            ) from error
        except ValueError as error:
            raise ApiError(f"{self._url} does not answer like TokenMesh: {error}") from error


def _piece(chunk: dict[str, Any]) -> ChatDelta:
    if "error" in chunk:
        raise ApiError(str(chunk["error"].get("message", chunk["error"])))
    request_id = str(chunk.get("id", ""))
    choices = chunk.get("choices") or [{}]
    # With n above 1 the chat goes on from the first choice.
    delta = {} if choices[0].get("index") else choices[0].get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    usage = chunk.get("usage") or {}
    num_tokens = int(usage.get("completion_tokens", 0))
    return ChatDelta(request_id, delta.get("content") or "", reasoning, num_tokens)


def _error_of(response: httpx.Response) -> TokenMeshError:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {response.status_code}"
    if response.status_code == httpx.codes.NOT_FOUND:
        return NotFound(message)
    return ApiError(message)
