"""A remote tier's URL without its secrets: only this may be shown, logged or serialised.

Passwords stand before the host (``redis://:password@host``), or among the parameters (``?password=...``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

__all__ = ["public_url", "scrub"]

_HIDDEN = "***"
# Parameters with other names may be secret.
_PUBLIC = frozenset(
    {"db", "protocol", "ssl_cert_reqs", "ssl_check_hostname", "max_connections", "socket_timeout", "region"}
)
_SECRET_OPTION = re.compile("key|secret|token|pass|credential|user|sas", re.IGNORECASE)


def public_url(url: object) -> str:
    """Return a URL without user, password and parameters that may be secret.

    Parameters
    ----------
    url : object
        The URL; of anything but a string only the type is returned.

    Returns
    -------
    str
        The URL as it was, where it has no secrets.
    """
    if not isinstance(url, str):
        return f"<{type(url).__name__}>"
    scheme, rest = _split(url)
    parameters = rest.partition("?")[2]
    shown = rest[len(_secret_part(rest)) :].partition("?")[0]
    public = [(name, value) for name, value in parse_qsl(parameters, keep_blank_values=True) if name in _PUBLIC]
    return scheme + shown + (f"?{urlencode(public)}" if public else "")


def scrub(text: str, url: str, options: Mapping[str, Any] | None = None) -> str:
    """Return a backend's message without the secrets of a URL and of the options that go with it.

    Parameters
    ----------
    text : str
        May quote them.
    url : str
        The URL as the user gave it.
    options : mapping or None
        Further arguments of the backend.
    """
    rest = _split(url)[1]
    secret = _secret_part(rest).removesuffix("@")
    found = {secret, secret.partition(":")[2]}
    # A message quotes parts of a URL that cannot be parsed, such as the "port" that a slash in a password makes.
    found |= set(re.split(r"[:/?#\[\]@]", secret.partition(":")[2]))
    found |= {value for name, value in parse_qsl(rest.partition("?")[2]) if name not in _PUBLIC}
    found |= {
        value for name, value in (options or {}).items() if isinstance(value, str) and _SECRET_OPTION.search(name)
    }
    found |= {unquote(part) for part in found}
    for part in sorted(found - {""}, key=len, reverse=True):
        text = text.replace(part, _HIDDEN)
    return text


def _split(url: str) -> tuple[str, str]:
    before, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    return before + separator, rest


def _secret_part(rest: str) -> str:
    """Return what stands before the host, with its ``@``; empty if there is nothing."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    port = authority.rpartition(":")[2] if ":" in authority else ""
    # Without an @ before the path, a port that is not a number is a password with a slash in it. A chained URL may
    # have a password of its own.
    doubtful = "@" in authority or (port and not port.isdecimal()) or "://" in rest
    return rest[: rest.rindex("@") + 1] if doubtful and "@" in rest else ""
