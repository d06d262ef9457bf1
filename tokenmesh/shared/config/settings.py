"""Settings: all sections of the mesh in one frozen object."""

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tokenmesh.shared.config.batches import BatchSettings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import (
    BusSettings,
    RedisSettings,
    ServiceSettings,
    TelemetrySettings,
)
from tokenmesh.shared.config.model import EncoderSettings, ModelSettings, TokenizerSettings
from tokenmesh.shared.config.placement import (
    BlockEventSettings,
    PrefixIndexSettings,
    SchedulerSettings,
)
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.config.worker import WorkerSettings

ENV_PREFIX = "TOKENMESH_"
ENV_DELIMITER = "__"


class Settings(BaseSettings):
    """All settings. A process reads the sections that concern it."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        env_ignore_empty=True,
        hide_input_in_errors=True,
    )

    models: tuple[ModelSettings, ...] = ()
    bus: BusSettings = BusSettings()
    redis: RedisSettings = RedisSettings()
    service: ServiceSettings = ServiceSettings()
    gateway: GatewaySettings = GatewaySettings()
    responses: ResponseSettings = ResponseSettings()
    batches: BatchSettings = BatchSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    encoder: EncoderSettings = EncoderSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    prefix_index: PrefixIndexSettings = PrefixIndexSettings()
    worker: WorkerSettings = WorkerSettings()
    block_events: BlockEventSettings = BlockEventSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    up: UpSettings = UpSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed: the loader merges the outside, so that errors can name it."""
        return (init_settings,)
