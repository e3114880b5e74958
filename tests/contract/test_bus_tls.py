"""The bus over TLS, with a certificate made on the spot."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from services.broker import Broker, BrokerConfig
from services.bus import BusUnavailable, Delivery, NatsBus
from tests.conftest import Connect


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of a certificate for 127.0.0.1 and of its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs the openssl command")
    folder: Path = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    named = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [program, "req", *made, *named, "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


async def test_requests_travel_over_tls(broker: Broker, nats_connect: Connect, certificate: tuple[str, str]) -> None:
    broker.config = BrokerConfig(tls_cert=certificate[0], tls_key=certificate[1])
    url = broker.start()
    assert url.startswith("tls://")
    bus = await nats_connect(url, tls=ssl.create_default_context(cafile=certificate[0]))

    async def echo(delivery: Delivery) -> bytes:
        return delivery.data

    await bus.respond("ei.echo", echo)
    assert await bus.request("ei.echo", b"x", 5) == b"x"


async def test_a_broker_with_an_unknown_certificate_is_not_trusted(
    broker: Broker, certificate: tuple[str, str]
) -> None:
    broker.config = BrokerConfig(tls_cert=certificate[0], tls_key=certificate[1])
    url = broker.start()
    with pytest.raises(BusUnavailable, match="no broker at tls://"):
        await NatsBus.connect(url, name="x", timeout_s=0.5)
