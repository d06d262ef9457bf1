"""APIS: the APIs of a gateway. A new one is a package in this folder and a line here."""

from typing import Final

from tokenmesh.services.gateway.apis.anthropic.api import ANTHROPIC
from tokenmesh.services.gateway.apis.cohere.api import COHERE
from tokenmesh.services.gateway.apis.ollama.api import OLLAMA
from tokenmesh.services.gateway.core.api import Api

APIS: Final[tuple[Api, ...]] = (ANTHROPIC, COHERE, OLLAMA)
