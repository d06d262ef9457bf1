"""What can be seen to be wrong before anything starts."""

from pathlib import Path
from typing import Final

from tokenmesh.cli.embedded.screen import Screen
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import ConfigError

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_PATH_STARTS: Final = ("/", "./", "../", "~")


def check_models(settings: Settings) -> None:
    """Raises ConfigError for a model that is meant as a directory and is no checkpoint.

    What may be a hub id is left to the services.
    """
    for model in settings.models:
        path = Path(model.model).expanduser()
        if not path.exists():
            if model.model.startswith(_PATH_STARTS):
                raise ConfigError(f"{model.model}: no such directory", param="--model")
        elif not (path / "config.json").is_file():
            raise ConfigError(
                f"{model.model} is no checkpoint: there is no config.json in it", param="--model"
            )


def check_address(settings: Settings) -> None:
    """Raises ConfigError when the gateways could not share what they listen on."""
    if settings.gateway.uds is not None and settings.up.gateways > 1:
        raise ConfigError(
            f"--uds is for one gateway, and --gateways is {settings.up.gateways}: a Unix socket "
            "cannot be shared",
            param="--uds",
        )


def warn_if_open(gateway: GatewaySettings, screen: Screen) -> None:
    """Warn when other machines reach the API and no key guards it."""
    has_keys = bool(gateway.api_key_hashes or gateway.keys_file)
    if gateway.host not in _LOOPBACK and not has_keys:
        what = "use this mesh and put it to sleep" if gateway.admin_routes else "use this mesh"
        screen.warn(f"anybody who reaches {gateway.host} may {what}: set --api-key or --keys-file")
