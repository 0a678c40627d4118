"""Certificates for tests of TLS, made by openssl."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

# What clients of Python 3.13 ask of certificates (VERIFY_X509_STRICT), beside their signatures.
SIGNS = "keyUsage=critical,keyCertSign,cRLSign"
SAN = "subjectAltName=IP:127.0.0.1,DNS:localhost"
SIGNED = f"{SAN}\nauthorityKeyIdentifier=keyid"


def make_certificates(where: Path) -> Callable[[str], str]:
    """Two authorities, "ours" and "theirs", each with a pair it has signed.

    Gives the path of NAME.pem, NAME.key and NAME-ca.pem.
    """
    for name in ("ours", "theirs"):
        ca, pair = where / f"{name}-ca", where / name
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        _openssl("req", "-x509", *new, "-subj", f"/CN={name} authority", "-days", 2,
                 "-addext", SIGNS, "-keyout", f"{ca}.key", "-out", f"{ca}.pem")  # fmt: skip
        _openssl("req", *new, "-subj", f"/CN={name}", "-keyout", f"{pair}.key",
                 "-out", f"{pair}.csr")  # fmt: skip
        (where / "ext").write_text(SIGNED)
        _openssl("x509", "-req", "-in", f"{pair}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key",
                 "-CAcreateserial", "-days", 2, "-extfile", where / "ext",
                 "-out", f"{pair}.pem")  # fmt: skip
    return lambda name: str(where / name)


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=30)
