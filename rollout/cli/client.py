"""What the commands that ask a running service share: its token, and the files of TLS."""

from __future__ import annotations

import argparse
from typing import Any

import rollout
from rollout.cli.flags import TOKEN, Row, add_rows, environment, token_of
from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import ConfigError
from rollout.rpc.tls import ClientTls

SERVICE: tuple[Row, ...] = (
    TOKEN,
    ("--tls-ca", "PEM", None, "speak TLS; the authority that signed the service's own"),
    ("--tls-cert", "PEM", None, "certificate to show, where the service asks for one"),
    ("--tls-key", "PEM", None, "its key"),
    ("--tls-server-name", "NAME", None,
     "what the service's certificate is made out to, where that is not its address"),
)  # fmt: skip


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """A token and TLS files; ``connect`` uses them."""
    add_rows(parser.add_argument_group("service"), SERVICE)


def connect(args: argparse.Namespace, address: str, timeout: float = DEFAULT_TIMEOUT) -> Any:
    """A ``Rollout`` of the service at ``address``; raises what ``Rollout.connect`` does."""
    token = token_of(args)
    return rollout.Rollout.connect(address, token, timeout=timeout, tls=client_tls(args))


def client_tls(args: argparse.Namespace, prefix: str = "tls") -> ClientTls | None:
    """The TLS files of flags that begin with ``prefix``, or of ROLLOUT_TLS_CA, _CERT and _KEY;
    None: no TLS.
    """
    given = {
        name: getattr(args, f"{prefix}_{name}") or environment(f"{prefix.upper()}_{name.upper()}")
        for name in ("ca", "cert", "key")
    }
    server_name: str | None = getattr(args, f"{prefix}_server_name")
    if given["ca"] is None:
        if given["cert"] or given["key"] or server_name:
            flag = f"--{prefix.replace('_', '-')}-ca"
            raise ConfigError(f"TLS needs {flag}: the authority that signed the service's own")
        return None
    return ClientTls(ca=given["ca"], cert=given["cert"], key=given["key"], server_name=server_name)
