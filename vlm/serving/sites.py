"""Decides which web pages may send requests to a service, since a page of any site can reach this machine."""

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from vlm.errors import UserError
from vlm.serving.server import LOCAL

ANY = "*"


class Sites:
    """The sites whose pages may send requests: a service's own, and others that are allowed.

    Args:
        local: Whether it listens only on this machine. It then answers only to names of this machine, because another
            site could let its own name resolve to this machine's address (DNS rebinding).
        origins: Further origins, such as https://example.org; "*" allows all.
    Raises:
        UserError: One is not an origin.
    """

    def __init__(self, *, local: bool, origins: Sequence[str] = ()) -> None:
        self.local, self.origins = local, tuple(origins)
        for origin in origins:
            host = re.fullmatch(r"[a-z]+://([^/?#@\s]+)", origin)
            if origin != ANY and (host is None or _name(host[1]) is None):
                raise UserError(f"--allow-origin {origin}: is not an origin; give one like https://example.org, or *")

    def check(self, headers: Headers) -> None:
        """Refuses a request by its Host and Origin.

        Raises:
            HTTPException: It comes from a page of another site, or has another host name.
        """
        if ANY in self.origins:
            return
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        names = (*LOCAL, *(urlsplit(one).hostname for one in self.origins))
        if self.local and _name(host) not in names:
            raise HTTPException(421, "ask by the address that the command printed")
        if origin is not None and origin not in self.origins and origin.lower().partition("://")[2] != host:
            raise HTTPException(403, "a page of another site may not ask")


def _name(host: str) -> str | None:
    """Returns a host without port and brackets; None if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
