"""Certificate: what HTTPS is served with, read again when its files have changed."""

import asyncio
import logging
import ssl
from pathlib import Path

from tokenmesh.shared.config.http import ListenerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)


class Certificate:
    """The TLS context of one server, and the files it came from."""

    def __init__(self, certfile: Path, settings: ListenerSettings) -> None:
        """Raises ConfigError when the files cannot be used."""
        self._certfile = certfile
        self._keyfile = settings.ssl_keyfile
        self._refresh_s = settings.ssl_refresh_s
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            self._load()
            if settings.ssl_ca_certs is not None:
                self.context.verify_mode = ssl.CERT_REQUIRED
                self.context.load_verify_locations(settings.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot use the certificate {certfile}: {error}", param="gateway.ssl_certfile"
            ) from error

    def _load(self) -> None:
        self._seen = self._stamps()
        self.context.load_cert_chain(self._certfile, self._keyfile)

    def _stamps(self) -> tuple[float, ...]:
        files = [self._certfile] + ([self._keyfile] if self._keyfile is not None else [])
        return tuple(file.stat().st_mtime for file in files)

    async def refresh(self) -> None:
        """Look for new files, for ever; connections made from then on get the new certificate."""
        while self._refresh_s:
            await asyncio.sleep(self._refresh_s)
            self.look()

    def look(self) -> None:
        """Read the files again when they have changed; broken ones leave the old in force."""
        try:
            if self._stamps() != self._seen:
                self._load()
                logger.info("a new certificate is in use: %s", self._certfile)
        except (OSError, ssl.SSLError) as error:
            logger.error("the new certificate %s cannot be used: %s", self._certfile, error)
