"""The metadata of cards that clients send, one card at a time."""

from __future__ import annotations

import threading
from typing import Any

from hf_ext.hub.front_matter import read_front_matter

from .errors import HubError

_BUSY_SECONDS = 20.0
# Limits the processor time for cards that many clients send at once.
_ONE_AT_A_TIME = threading.Lock()


def read_metadata(card: str) -> dict[str, Any]:
    """The metadata of a card, as data that JSON can say; empty when there is none."""
    if not _ONE_AT_A_TIME.acquire(timeout=_BUSY_SECONDS):
        raise HubError(503, "other cards are being read: try again in some seconds", headers={"Retry-After": "5"})
    try:
        return read_front_matter(card)
    finally:
        _ONE_AT_A_TIME.release()
