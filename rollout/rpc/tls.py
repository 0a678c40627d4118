"""Who the two ends of a connection are, gRPC or HTTP, proven by certificates (also mutually).

Files that were renewed are those of the connections that are made from then on.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from rollout.errors import ConfigError
from rollout.rpc.address import split_address

log = logging.getLogger(__name__)
T = TypeVar("T")
_BEGIN = "-----BEGIN"
_ANY_KEY = "DEFAULT:@SECLEVEL=0"  # short ones, too, as gRPC takes them
_CERTIFICATE = re.compile(r"-----BEGIN ((?:\w+ )?CERTIFICATE)-----.+?-----END \1-----", re.DOTALL)


class Renewable(Generic[T]):
    """``value``: what ``make`` makes of PEM files, as they were when it was last looked at.

    Files that cannot be used, as while one of a pair has been replaced, change nothing.
    """

    def __init__(self, make: Callable[[], T], *paths: str | None) -> None:
        self._make = make
        self._paths = [path for path in paths if path is not None and _BEGIN not in path]
        self._seen = self._judged = self._stamps()
        self.value = make()

    def look(self) -> bool:
        """Whether ``value`` is another one now: the files have changed, and are good."""
        found = self._stamps()
        if found == self._seen:
            return False
        try:
            self.value = self._make()
        except ConfigError as error:
            if found != self._judged:
                log.warning("TLS goes on with the files as they were: %s", error)
            self._judged = found
            return False
        self._seen = found
        return True

    def newest(self) -> T:
        self.look()
        return self.value

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """Of each file, told from another one in its place; taken before it is read."""
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """PEM files of a server: its ``cert`` chain and ``key``.

    With ``client_ca`` only clients with a certificate of that authority may connect.
    """

    cert: str
    key: str
    client_ca: str | None = None

    def credentials(self) -> Any:
        """Of a gRPC server, which asks for them at each handshake; ``ConfigError``: bad files."""
        files = Renewable(self._configuration, *self._paths)
        return grpc.dynamic_ssl_server_credentials(
            files.value, lambda: files.value if files.look() else None, self.client_ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """The same for a server of Python's own sockets (HTTP)."""
        files = Renewable(self._context, *self._paths)

        def renew(connection: ssl.SSLObject, *_: object) -> None:
            connection.context = files.newest()

        listens = files.value
        listens.sni_callback = renew  # with each client's first word, a name in it or not
        return listens

    @property
    def _paths(self) -> tuple[str | None, ...]:
        return self.cert, self.key, self.client_ca

    def _configuration(self) -> Any:
        pair = (_read(self.key, "key"), _read(self.cert, "certificate"))
        authority = None if self.client_ca is None else _read(self.client_ca, "client authority")
        plain = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        plain.set_ciphers(_ANY_KEY)
        self._loaded(plain)  # says what is wrong with the files, which gRPC does not
        return grpc.ssl_server_certificate_configuration([pair], authority)

    def _context(self) -> ssl.SSLContext:
        found = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        found.minimum_version = ssl.TLSVersion.TLSv1_2
        return self._loaded(found)

    def _loaded(self, found: ssl.SSLContext) -> ssl.SSLContext:
        with _usable(self.cert, self.key, self.client_ca):
            _load_pair(found, self.cert, self.key)
            if self.client_ca is not None:
                found.load_verify_locations(self.client_ca)
                found.verify_mode = ssl.CERT_REQUIRED
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """PEM files of a client: the ``ca`` its server must be signed by (or the PEM text itself), and
    its own certificate.

    ``cert`` and ``key`` are needed where the server asks for them (its ``client_ca``).
    ``server_name``: what the server's certificate is made out to, where that is not the address.
    """

    ca: str
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("a client's certificate needs its key, and the key its certificate")

    @classmethod
    def of_peer(cls, ca: str, server_name: str, shown: ServerTls | None) -> ClientTls | None:
        """For a peer of which another has told us: the text of its authority ("": it speaks no
        TLS) and the name in its certificate. ``shown``: our server's own, where it asks for one.
        """
        if not ca:
            return None
        if not ca.startswith(_BEGIN):
            raise ConfigError("tls_ca is an authority's certificates in PEM, never a path")
        return cls(
            ca=ca, server_name=server_name or None,
            cert=None if shown is None else shown.cert, key=None if shown is None else shown.key,
        )  # fmt: skip

    def credentials(self) -> Renewable[Any]:
        """Of gRPC channels; ``ConfigError`` where a file cannot be read, or two do not fit."""
        return Renewable(self._credentials, self.ca, self.cert, self.key)

    def _credentials(self) -> Any:
        """What gRPC would take all the same, to connect to nobody, is a ``ConfigError``."""
        _ = self.ca_text
        if self.cert is not None:
            plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            plain.set_ciphers(_ANY_KEY)
            with _usable(self.cert, self.key):
                _load_pair(plain, self.cert, self.key)
        return grpc.ssl_channel_credentials(
            _read(self.ca, "authority"),
            None if self.key is None else _read(self.key, "key"),
            None if self.cert is None else _read(self.cert, "certificate"),
        )

    @property
    def ca_text(self) -> str:
        """The authority's certificates in PEM, without what else its file says; ``ConfigError``
        where there is none, or it cannot be read.
        """
        text = _read(self.ca, "authority").decode("ascii", "replace")
        found = [one[0] for one in _CERTIFICATE.finditer(text)]
        if not found:
            raise ConfigError(f"the TLS authority {self.ca:.300} holds no certificate in PEM")
        return "".join(f"{one}\n" for one in found)

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        if self.server_name is None:
            return ()
        return (("grpc.ssl_target_name_override", self.server_name),)


def problem(address: str, tls: ClientTls | None, timeout: float = 2.0) -> str | None:
    """Why a service that accepts connections at "host:port" cannot be talked to with ``tls``.

    Blocks, for a few times ``timeout`` seconds at most. None: TLS is not the reason, or nobody is
    there.
    """
    host, port = split_address(address)
    name = host if tls is None else tls.server_name or host
    try:
        with socket.create_connection((host, port), timeout) as sock:
            secured = _Secured(sock, client_context(tls, "h2"), name)
            secured.shake_hands()
            if tls is None:
                return _NEEDS_TLS
            # A server that does not want our certificate ends it now; another one speaks first.
            return secured.refusal()
    except ssl.SSLCertVerificationError as error:
        return _distrust(error)
    except ssl.SSLError as error:
        alert = "ALERT" in (error.reason or "")
        if tls is None:
            return _NEEDS_TLS if alert else None
        if alert:
            return _REFUSED
        return "it does not speak TLS: leave out --tls-ca (tls=), or check the port"
    except OSError:
        return None


class _Secured:
    """A client's TLS over ``sock``, which stays its owner's to close: Python's own ``wrap_socket``
    leaves open what it has made where the connection is cut meanwhile.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str) -> None:
        self._sock, self._in, self._out = sock, ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=name)

    def shake_hands(self) -> None:
        self._take(self._tls.do_handshake)

    def refusal(self) -> str | None:
        """Why the server ends the connection; None: it speaks, or waits for us."""
        try:
            return None if self._take(lambda: self._tls.read(1)) else _REFUSED
        except TimeoutError:
            return None
        except OSError:  # an alert, or a connection that is cut without one
            return _REFUSED

    def _take(self, step: Callable[[], T]) -> T:
        """The result of one step of TLS, for which is sent and received what it wants."""
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._sock.sendall(self._out.read())
                if received := self._sock.recv(1 << 14):
                    self._in.write(received)
                else:
                    self._in.write_eof()
            else:
                self._sock.sendall(self._out.read())
                return result


_REFUSED = (
    "it refuses our certificate, or misses one: --tls-cert and --tls-key (cert=, key=), of an "
    "authority that it trusts, for clients, and not expired by the clock of its host"
)
_NEEDS_TLS = "it speaks TLS: pass --tls-ca PEM (tls=ClientTls(ca=...)), who signed its certificate"


# OpenSSL's codes of certificates that are good for another time, or another name.
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_IP = 9, 10, 62, 64


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    """Why we do not trust a server's certificate, and what to do about it."""
    if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
        remedy = "set the clock of this host, or renew the certificate: that service then takes it"
    elif error.verify_code in (_OTHER_NAME, _OTHER_IP):
        remedy = (
            "reach it by a name that the certificate has, or say one of them: --tls-server-name "
            "(server_name=)"
        )
    else:
        remedy = "is --tls-ca (ca=) its own?"
    return f"its certificate is not trusted: {error.verify_message.rstrip('.')}; {remedy}"


def client_context(tls: ClientTls | None, protocol: str) -> ssl.SSLContext:
    """Of a client of Python's own sockets; without ``tls`` it believes anybody.

    ``ConfigError`` for bad files.
    """
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    found.set_alpn_protocols([protocol])
    if tls is None:  # whoever it is: only whether TLS is spoken is asked
        found.check_hostname = False
        found.verify_mode = ssl.CERT_NONE
        return found
    with _usable(tls.cert, tls.key):
        found.load_verify_locations(cadata=tls.ca_text)
        if tls.cert is not None:
            _load_pair(found, tls.cert, tls.key)
    return found


def _load_pair(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    def encrypted() -> str:  # else the terminal is asked, and waited for
        raise ConfigError(
            f"the TLS key {key} is encrypted, and no passphrase can be given here: write it "
            "without one (openssl pkey -in KEY -out NEW)"
        )

    context.load_cert_chain(cert, key, encrypted)


@contextmanager
def _usable(*paths: str | None) -> Iterator[None]:
    """``ConfigError`` where files of these cannot be loaded."""
    try:
        yield
    except OSError as error:  # ssl's errors are among them
        absent = next((path for path in paths if path and not Path(path).is_file()), None)
        why = error if absent is None else f"{absent} is no file"
        raise ConfigError(f"the TLS files cannot be used: {why}") from None


def _read(path: str, what: str) -> bytes:
    if _BEGIN in path:
        return path.encode()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the TLS {what} {path} cannot be read: {error.strerror}") from None
