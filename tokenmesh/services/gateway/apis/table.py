"""APIS: the APIs of a gateway. A new one is a package in this folder and a line here."""

from typing import Final

from tokenmesh.services.gateway.apis.anthropic.api import ANTHROPIC
from tokenmesh.services.gateway.apis.audio.api import AUDIO
from tokenmesh.services.gateway.apis.batches.api import BATCHES
from tokenmesh.services.gateway.apis.cohere.api import COHERE
from tokenmesh.services.gateway.apis.files.api import FILES
from tokenmesh.services.gateway.apis.ollama.api import OLLAMA
from tokenmesh.services.gateway.apis.openai.api import OPENAI
from tokenmesh.services.gateway.apis.operator.api import OPERATOR
from tokenmesh.services.gateway.apis.pooling.api import POOLING
from tokenmesh.services.gateway.apis.realtime.api import REALTIME
from tokenmesh.services.gateway.apis.responses.api import RESPONSES
from tokenmesh.services.gateway.apis.sagemaker.api import SAGEMAKER
from tokenmesh.services.gateway.apis.scale_out.api import SCALE_OUT
from tokenmesh.services.gateway.core.api import Api

APIS: Final[tuple[Api, ...]] = (
    OPENAI,
    RESPONSES,
    ANTHROPIC,
    COHERE,
    AUDIO,
    REALTIME,
    POOLING,
    FILES,
    BATCHES,
    OLLAMA,
    SAGEMAKER,
    SCALE_OUT,
    OPERATOR,
)
