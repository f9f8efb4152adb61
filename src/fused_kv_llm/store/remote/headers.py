"""Reading the headers of objects on a remote tier, and no more than those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fused_kv_llm.store.remote.tier import RemoteTier

__all__ = ["read_headers"]

# Most headers are far shorter; those with the texts and token ids of chunks of several thousand tokens are not.
_FIRST_NBYTES = 16 * 1024
_LENGTH_NBYTES = 8
# Texts of some ten million tokens. What claims more is damaged.
_MOST_NBYTES = 256 * 2**20


def read_headers(remote: RemoteTier, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Return the beginnings of objects, at least as long as the headers that they claim to have.

    Parameters
    ----------
    remote : RemoteTier
    sizes : dict of str to int
        The objects' names, and how many bytes each has or should have. An object whose header claims more is damaged,
        and no more of it is read.

    Raises
    ------
    StoreUnavailableError
        The remote tier cannot be used.
    """
    found = remote.get(list(sizes), _FIRST_NBYTES)
    for name, data in list(found.items()):
        needed = int.from_bytes(data[:_LENGTH_NBYTES], "little") + _LENGTH_NBYTES
        if len(data) == _FIRST_NBYTES < needed <= min(sizes[name], _MOST_NBYTES):
            # One by one: they are rare, and each may be long.
            found.update(remote.get([name], needed))
    return found
