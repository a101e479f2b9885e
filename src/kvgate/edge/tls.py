"""TLS on both sides of the gateway: the engine's certificate is verified, always; clients are shown ours.

A file that cannot be used is a `BadCertificate` that names it, before anything listens.
"""

from __future__ import annotations

import ssl


class BadCertificate(ValueError):
    """A certificate, key or CA file cannot be used; the message says which, and why."""


def engine_context(ca: str | None) -> ssl.SSLContext:
    """Trust the system's CAs, or those of the file `ca` alone. Names are checked in both cases."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as wrong:
        raise BadCertificate(f"--upstream-ca {ca}: {_words(wrong)}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def listening_context(cert: str, key: str | None) -> ssl.SSLContext:
    """What clients are shown; `key` may be in the same file as `cert`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load(context, cert, key)
    return context


def load(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Read the files (again): connections made from now on are shown what they hold."""
    try:
        # A function for the password, so that an encrypted key is an error and never a prompt.
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as wrong:
        shown = f"--tls-cert {cert}" + (f" --tls-key {key}" if key else "")
        raise BadCertificate(f"{shown}: {_words(wrong)}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")


def _words(wrong: OSError | ValueError) -> str:
    if isinstance(wrong, ssl.SSLError):
        return f"not PEM files that belong together ({wrong.reason or wrong})"
    return str(getattr(wrong, "strerror", None) or wrong)
