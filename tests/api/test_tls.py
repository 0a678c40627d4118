"""Weights over TLS: a client without the right certificate changes nothing and learns nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from certificates import make_certificates
from proxies import Proxy

from rollout import Rollout
from rollout.cli.main import main
from rollout.errors import ConfigError, EngineClosed
from rollout.rpc.client import RolloutClient
from rollout.rpc.tls import ClientTls, ServerTls, client_context, problem
from rollout.server.grpc.server import serve
from rollout.weight_sync.protocol.membership import SendTo
from rollout.wire.codec import from_json, to_json


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def address(engine, made):
    """The shared engine behind a second door, which asks for certificates."""
    stop = asyncio.Event()
    found: list[str] = []
    ready = threading.Event()
    tls = ServerTls(cert=made("ours.pem"), key=made("ours.key"), client_ca=made("ours-ca.pem"))

    async def main() -> None:
        server = await serve(engine._async, tls=tls)
        found.append(server.address)
        ready.set()
        await stop.wait()
        await server.stop()

    future = asyncio.run_coroutine_threadsafe(main(), engine._loop._loop)
    assert ready.wait(20)
    yield found[0]
    engine._loop._loop.call_soon_threadsafe(stop.set)
    future.result(20)


def client(made, name: str, ca: str = "ours") -> ClientTls:
    return ClientTls(ca=made(f"{ca}-ca.pem"), cert=made(f"{name}.pem"), key=made(f"{name}.key"))


@pytest.mark.parametrize("transport", ["inline", "broadcast"])
def test_the_right_certificate_may_do_everything(address, made, other_weights, transport) -> None:
    with Rollout.connect(address, timeout=10, tls=client(made, "ours")) as rollout:
        receipt = rollout.update_weights(other_weights, transport=transport)
        assert receipt.version == rollout.weight_version
        assert rollout.check_weights(other_weights).equal
        assert rollout.generate([[1, 2, 3]])[0].finished


@pytest.mark.parametrize("who", ["nobody", "plain", "theirs", "mistaken"])
def test_others_are_not_let_in(address, made, who, capfd) -> None:
    tls = {
        "nobody": ClientTls(ca=made("ours-ca.pem")),
        "plain": None,
        "theirs": client(made, "theirs"),
        "mistaken": client(made, "ours", ca="theirs"),  # it is the server that is not trusted
    }[who]
    words = {
        "nobody": "refuses our certificate, or misses one",
        "plain": "it speaks TLS: pass --tls-ca",
        "theirs": "refuses our certificate",
        "mistaken": "its certificate is not trusted",
    }[who]
    with pytest.raises(EngineClosed, match=words):
        Rollout.connect(address, timeout=5, tls=tls)


def test_a_certificate_of_another_time_or_name_is_not_put_down_to_its_authority(
    address, made, tmp_path
) -> None:
    of_another = dataclasses.replace(client(made, "ours"), server_name="other")
    with pytest.raises(EngineClosed, match=r"Hostname mismatch.* 'other'; .*--tls-server-name"):
        Rollout.connect(address, timeout=5, tls=of_another)
    pair = {"cert": str(tmp_path / "expired.pem"), "key": made("ours.key")}
    signed = ("-req", "-in", made("ours.csr"), "-CA", made("ours-ca.pem"), "-days", "0")
    signed += ("-CAkey", made("ours-ca.key"), "-extfile", made("ext"), "-out", pair["cert"])
    subprocess.run(["openssl", "x509", *signed], check=True, capture_output=True, timeout=30)
    time.sleep(1.1)  # certificates end at a second
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", ServerTls(**pair).credentials())
    server.start()
    try:
        why = problem(f"127.0.0.1:{port}", client(made, "ours"))
    finally:
        server.stop(None)
    assert "certificate has expired; set the clock of this host, or renew" in str(why)


def test_a_service_without_tls_is_told_from_one_that_is_not_there(engine, made) -> None:
    with pytest.raises(EngineClosed, match="it does not speak TLS"):
        Rollout.connect(engine.address, timeout=5, tls=client(made, "ours"))
    with pytest.raises(EngineClosed, match="does not answer"):
        Rollout.connect("127.0.0.1:1", timeout=5, tls=client(made, "ours"))


def replaced(where: Path, made, who: str, *names: str) -> None:
    """Files of ``where`` by those of ``who``, each whole."""
    for name in names:
        new = Path(shutil.copy(made(who + name), where / "new"))
        new.replace(where / f"it{name}")


ALL = (".pem", ".key", "-ca.pem")


@pytest.fixture
def theirs_now(tmp_path, made):
    """Files of an authority and a pair, and what replaces them, all or some."""
    replaced(tmp_path, made, "ours", *ALL)
    return lambda *names, who="theirs": replaced(tmp_path, made, who, *(names or ALL))


def test_connections_go_by_the_files_as_they_were_renewed(
    engine, made, tmp_path, theirs_now, caplog, eventually
) -> None:
    pair = {"cert": str(tmp_path / "it.pem"), "key": str(tmp_path / "it.key")}
    ca = str(tmp_path / "it-ca.pem")
    loop = engine._loop._loop
    serving = serve(engine._async, tls=ServerTls(**pair, client_ca=ca))
    server = asyncio.run_coroutine_threadsafe(serving, loop).result(20)
    ours = client(made, "ours")
    try:
        with (
            Proxy(server.address) as proxy,
            Rollout.connect(proxy.address, timeout=10, tls=ClientTls(ca=ca, **pair)) as rollout,
            Rollout.connect(proxy.address, timeout=10, tls=ours) as before,
        ):

            def goes_on(who: Rollout = rollout) -> bool:
                return who.generate([[1, 2]])[0].finished and who.weight_info().state == "idle"

            def comes_back() -> bool:
                try:
                    return goes_on()
                except EngineClosed:  # it has not seen yet that it was cut
                    return False

            assert goes_on()
            assert goes_on(before)
            theirs_now()
            assert goes_on()
            assert goes_on(before)  # by the connections that there are
            proxy.cut()
            eventually(comes_back)
            with pytest.raises(EngineClosed):
                before.weight_info()
            with pytest.raises(EngineClosed, match="its certificate is not trusted"):
                Rollout.connect(server.address, timeout=5, tls=ours)
            theirs_now(".key", who="ours")  # of a pair that is being replaced
            proxy.cut()
            eventually(comes_back)
            assert "TLS goes on with the files as they were" in caplog.text
            theirs_now(".key")
            proxy.cut()
            eventually(comes_back)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(20)


async def test_https_goes_by_the_files_as_they_were_renewed(made, tmp_path, theirs_now) -> None:
    files = ServerTls(
        cert=str(tmp_path / "it.pem"), key=str(tmp_path / "it.key"),
        client_ca=str(tmp_path / "it-ca.pem"),
    )  # fmt: skip

    async def answer(_, writer) -> None:
        writer.write(b"!")
        writer.close()

    async def answered(who: str) -> bytes:
        """What the server says to one of this authority; b"": it refuses the certificate."""
        context = client_context(client(made, who, who), "http/1.1")
        reader, writer = await asyncio.open_connection(*where, ssl=context)
        try:
            return await reader.read()
        except (OSError, ssl.SSLError):
            return b""
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=files.context()) as server:
        where = server.sockets[0].getsockname()
        assert await answered("ours") == b"!"
        theirs_now("-ca.pem")  # only whom it lets in
        assert await answered("ours") == b""
        theirs_now()
        assert await answered("theirs") == b"!"
        with pytest.raises(ssl.SSLCertVerificationError):
            await answered("ours")
        theirs_now(".key", who="ours")
        assert await answered("theirs") == b"!"


def test_the_command_line_speaks_tls(address, made, capsys, monkeypatch, checkpoint) -> None:
    files = ["--tls-ca", made("ours-ca.pem"), "--tls-cert", made("ours.pem")]
    files += ["--tls-key", made("ours.key")]
    assert main(["info", address, *files]) == 0
    assert "running" in capsys.readouterr().out
    ids = ["--token-ids", "1,2", "--max-tokens", "2"]
    assert main(["generate", "--connect", address, *ids, *files]) == 0
    assert main(["check", "--against", checkpoint, address, *files]) in (0, 1)
    assert main(["info", address]) == 2
    assert "EngineClosed: cannot talk to" in capsys.readouterr().err
    for name, value in zip(("CA", "CERT", "KEY"), files[1::2], strict=True):
        monkeypatch.setenv(f"ROLLOUT_TLS_{name}", value)
    assert main(["info", address]) == 0


def test_what_cannot_be_read_is_a_mistake_by_name(made) -> None:
    with pytest.raises(ConfigError, match=r"authority .*absent"):
        Rollout.connect("127.0.0.1:1", tls=ClientTls(ca="absent"))
    with pytest.raises(ConfigError, match="needs its key"):
        ClientTls(ca="x", cert="y")
    with pytest.raises(ConfigError, match="certificate"):
        ServerTls(cert="absent", key=made("ours.key")).credentials()
    with pytest.raises(ConfigError, match=r"TLS files cannot be used: .*key values mismatch"):
        ServerTls(cert=made("ours.pem"), key=made("theirs.key")).credentials()


def test_a_key_that_is_encrypted_is_refused_and_no_passphrase_asked_for(made, tmp_path, capfd):
    key = str(tmp_path / "encrypted.key")
    aes = ("-aes256", "-passout", "pass:secret", "-in", made("ours.key"), "-out", key)
    subprocess.run(["openssl", "pkey", *aes], check=True, capture_output=True, timeout=30)
    pair = {"cert": made("ours.pem"), "key": key}
    with pytest.raises(ConfigError, match=r"encrypted\.key is encrypted"):
        ServerTls(**pair).credentials()
    with pytest.raises(ConfigError, match=r"encrypted\.key is encrypted"):
        client_context(ClientTls(ca=made("ours-ca.pem"), **pair), "h2")
    assert "pass phrase" not in capfd.readouterr().err


def test_a_key_that_is_short_serves_grpc(tmp_path) -> None:
    cert, key = str(tmp_path / "short.pem"), str(tmp_path / "short.key")
    asked = ("-x509", "-newkey", "rsa:1024", "-nodes", "-subj", "/CN=here", "-out", cert)
    subprocess.run(
        ["openssl", "req", *asked, "-keyout", key], check=True, capture_output=True, timeout=30
    )
    assert ServerTls(cert=cert, key=key, client_ca=cert).credentials() is not None


def test_an_authority_may_come_with_comments_and_is_sent_without(made, tmp_path) -> None:
    plain = Path(made("ours-ca.pem")).read_text()
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(f"# Issuer: F\u0151tan\u00fas\u00edtv\u00e1ny\n{plain}", encoding="utf-8")
    tls = ClientTls(ca=str(bundle))
    assert len(client_context(tls, "h2").get_ca_certs()) == 1
    assert ClientTls(ca=tls.ca_text).ca_text == tls.ca_text == plain
    wanted = SendTo(address="127.0.0.1:1", version=1, timeout=1.0, tls_ca=tls.ca_text * 300)
    assert from_json(SendTo, to_json(wanted)) == wanted
    bundle.write_text("# none")
    with pytest.raises(ConfigError, match="holds no certificate in PEM"):
        client_context(tls, "h2")


def test_an_engine_reads_no_file_that_a_peer_names_as_an_authority(engine, made) -> None:
    wanted = SendTo(address="127.0.0.1:1", version=0, timeout=1.0, tls_ca=made("ours-ca.pem"))
    with pytest.raises(ConfigError, match="never a path"):
        engine._async.backend.send_to(wanted)


def test_an_address_of_another_form_is_told() -> None:
    with closing(RolloutClient("localhost", timeout=1.0)) as client:
        assert "is not host:port" in str(client.problem())
