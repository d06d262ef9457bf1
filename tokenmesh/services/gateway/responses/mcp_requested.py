"""Which MCP servers a request names. The operator says which there are; a request only chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.shared.config.responses import McpServerSettings
from tokenmesh.shared.errors import InvalidInput

_REFUSED: Final = ("connector_id", "authorization", "headers")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedServer:
    """One `mcp` tool of a request."""

    place: str
    """Its path in the request."""
    label: str
    settings: McpServerSettings
    allowed: frozenset[str] | None
    """Names of tools; None: all that the server has."""

    def allows(self, name: str) -> bool:
        """Whether both the operator and the request want this tool offered."""
        by_operator = self.settings.allowed_tools
        is_wanted = self.allowed is None or name in self.allowed
        return is_wanted and (by_operator is None or name in by_operator)


def read_servers(
    tools: Sequence[dict[str, Any]], servers: Mapping[str, McpServerSettings]
) -> list[RequestedServer]:
    """Raises InvalidInput for a server that is not configured, or is to be used in another way."""
    found: dict[str, RequestedServer] = {}
    for index, tool in enumerate(tools):
        if tool.get("type") != "mcp":
            continue
        place = f"tools[{index}]"
        label = tool.get("server_label")
        settings = servers.get(label) if isinstance(label, str) else None
        if not isinstance(label, str) or settings is None:
            known = ", ".join(sorted(servers)) or "none"
            where = f"{place}.server_label"
            raise InvalidInput(
                f"{where} {str(label)[:80]!r} is no MCP server here; configured are: {known}",
                param=where,
            )
        if label in found:
            where = f"{place}.server_label"
            raise InvalidInput(f"{where} {label!r} is there twice", param=where)
        _check(tool, settings, place)
        allowed = _allowed(tool.get("allowed_tools"), f"{place}.allowed_tools")
        found[label] = RequestedServer(place=place, label=label, settings=settings, allowed=allowed)
    return list(found.values())


def _check(tool: dict[str, Any], settings: McpServerSettings, place: str) -> None:
    for name in _REFUSED:
        if tool.get(name) is not None:
            raise NotSupported(
                f"{place}.{name} is not supported: the operator configures MCP servers",
                param=f"{place}.{name}",
            )
    if tool.get("server_url") not in (None, settings.url):
        where = f"{place}.server_url"
        raise InvalidInput(f"{where} is not the URL of this server; leave it out", param=where)
    if tool.get("require_approval") != "never":
        where = f"{place}.require_approval"
        raise NotSupported(
            f"{where} must be 'never': approval of single calls is not supported", param=where
        )


def _allowed(value: object, place: str) -> frozenset[str] | None:
    if isinstance(value, dict):
        if unknown := sorted(set(value) - {"tool_names"}):
            where = f"{place}.{unknown[0]}"
            raise NotSupported(f"{where} is not supported: name the tools", param=where)
        value = value.get("tool_names")
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidInput(f"{place} must be a list of names", param=place)
    return frozenset(value)
