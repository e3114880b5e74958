"""The bus that a service's settings describe."""

import ssl

from structlog.typing import FilteringBoundLogger

from services.bus import NatsBus
from services.settings import ServiceSettings, SettingsError, read_seed


async def connect(settings: ServiceSettings, log: FilteringBoundLogger) -> NatsBus:
    """Connect as these settings say, waiting for the broker. BusRefused for a wrong key, SettingsError for a file."""
    return await NatsBus.connect(
        settings.nats_url,
        name=settings.name,
        nkey_seed=read_seed(settings.nats_nkey),
        inbox=f"_INBOX.{settings.service}",
        tls=_trusted(settings.nats_tls_ca),
        log=log,
    )


def _trusted(path: str) -> ssl.SSLContext | None:
    """What the broker must be certified by; None for no more than its URL asks for."""
    try:
        return ssl.create_default_context(cafile=path) if path else None
    except OSError as error:
        raise SettingsError(f"nats_tls_ca = {path!r}: {error.strerror or error}") from error
