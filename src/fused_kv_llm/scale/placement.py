"""Which replica a request goes to: where its chunks and its conversation are, unless that replica is too busy."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from fused_kv_llm.errors import ConfigError

__all__ = ["Held", "Part", "Placement", "PlacementOptions", "RoutingKey", "rendezvous_weight"]

_MASK = 2**64 - 1
# What one router remembers of its own decisions about a replica, at most.
_MOST_EXPECTED = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt whose KV may be held somewhere.

    Parameters
    ----------
    key : int
        Unsigned 64-bit name of its content.
    size : int
        How much of the prompt it is, for instance in characters. Its KV is proportional to that.
    """

    key: int
    size: int


@dataclass(frozen=True, slots=True)
class RoutingKey:
    """What is known of a request before it is planned.

    Parameters
    ----------
    size : int
        Of the whole prompt, in the unit of the parts.
    chunks : tuple of Part
        Stored chunks in the prompt.
    prefixes : tuple of Part
        The conversation up to each of its messages, the longest first. The first is the prompt itself.
    """

    size: int
    chunks: tuple[Part, ...] = ()
    prefixes: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """What a replica says that it holds.

    Parameters
    ----------
    chunks : frozenset of int
        Keys of chunks whose KV is in its memory.
    prefixes : frozenset of int
        Keys of conversations that it has answered.
    """

    chunks: frozenset[int] = frozenset()
    prefixes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """How residence and load are weighed.

    Parameters
    ----------
    load_weight : float
        Share of a prompt that has to be resident to outweigh one more request than the least busy replica has.
    imbalance : float
        Requests by which a replica may be ahead of the least busy one. Beyond it, the less busy of two replicas that
        are drawn among those with less to do is taken.
    cold_credit : float
        What a chunk that is resident nowhere counts at the replica that rendezvous hashing gives it to, as a share of
        a resident one.
    settle_s : float
        Seconds for which a replica is believed to hold what was sent to it, whatever it says.

    Raises
    ------
    ConfigError
        If a value cannot work.
    """

    load_weight: float = 0.05
    imbalance: float = 8.0
    cold_credit: float = 0.5
    settle_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("load_weight", "imbalance", "cold_credit", "settle_s"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"placement: {name}={value!r} cannot work: give a number that is not negative.")
        if self.cold_credit > 1:
            raise ConfigError(f"placement: cold_credit={self.cold_credit!r} is a share: give one between 0 and 1.")


class Placement:
    """Ranks replicas for requests.

    It knows nothing of a cluster: whoever uses it says what replicas there are, what they hold and how busy they are.
    Used by one thread.

    Parameters
    ----------
    options : PlacementOptions or None
        None takes the defaults.
    now_s : callable
        A clock that only goes forward.
    seed : int or None
        Of the draws among replicas when one is too busy.
    """

    def __init__(
        self,
        options: PlacementOptions | None = None,
        now_s: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self.options = options or PlacementOptions()
        self._now_s, self._random = now_s, random.Random(seed)
        self._held: dict[str, Held] = {}
        # By replica, what was sent to it lately, by key: until when that is believed.
        self._expected: dict[str, OrderedDict[int, float]] = {}

    def update(self, replica: str, held: Held) -> None:
        """Take what a replica says that it holds in place of what it said before."""
        self._held[replica] = held

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these."""
        for known in (self._held, self._expected):
            for name in [name for name in known if name not in replicas]:
                del known[name]

    def routed(self, replica: str, key: RoutingKey) -> None:
        """Note that a request was sent to a replica, which will hold its chunks and its conversation soon."""
        expected = self._expected.setdefault(replica, OrderedDict())
        until_s = self._now_s() + self.options.settle_s
        for part in (*key.chunks, *key.prefixes[:1]):
            expected[part.key] = until_s
            expected.move_to_end(part.key)
        while len(expected) > _MOST_EXPECTED:
            expected.popitem(last=False)

    def resident(self, replica: str, key: RoutingKey) -> int:
        """Return how much of a prompt a replica holds, in the unit of its parts, and no more than its size.

        A chunk counts once, however often it stands in the prompt; of the conversation the longest part counts.
        """
        chunks = {part.key: part.size for part in key.chunks if self._has_chunk(replica, part.key)}
        prefix = next((part.size for part in key.prefixes if self._has_prefix(replica, part.key)), 0)
        return min(key.size, sum(chunks.values()) + prefix)

    def rank(self, key: RoutingKey, loads: Mapping[str, float]) -> list[str]:
        """Return the replicas, the best for a request first.

        Parameters
        ----------
        key : RoutingKey
        loads : mapping of str to float
            Requests that each replica has, those that wait included.

        Returns
        -------
        list of str
            All replicas, each once.
        """
        if not loads:
            return []
        scores = self._scores(key, loads)
        # Without anything to go by, a request goes to the least busy, and equal ones are shared out by its content.
        tie = key.prefixes[0].key if key.prefixes else self._random.getrandbits(64)
        order = sorted(loads, key=lambda name: (-scores[name], loads[name], -rendezvous_weight(tie, name), name))
        if loads[order[0]] - min(loads.values()) > self.options.imbalance:
            order = self._balanced(order, loads)
        return order

    def _scores(self, key: RoutingKey, loads: Mapping[str, float]) -> dict[str, float]:
        least, size = min(loads.values()), max(1, key.size)
        cold = dict.fromkeys(loads, 0)
        for part in {part.key: part for part in key.chunks}.values():
            if not any(self._has_chunk(name, part.key) for name in loads):
                cold[max(loads, key=lambda name: (rendezvous_weight(part.key, name), name))] += part.size
        return {
            name: (self.resident(name, key) + self.options.cold_credit * cold[name]) / size
            - self.options.load_weight * (load - least)
            for name, load in loads.items()
        }

    def _balanced(self, order: list[str], loads: Mapping[str, float]) -> list[str]:
        """Put the less busy of two replicas first, drawn among those that have less to do than the best."""
        others = [name for name in order[1:] if loads[name] < loads[order[0]]]
        # `others` is in the order of the scores: of two that are equally busy the better one is taken.
        drawn = sorted(self._random.sample(range(len(others)), min(2, len(others))))
        first = min((others[place] for place in drawn), key=lambda name: loads[name])
        return [first, *(name for name in order if name != first)]

    def _has_chunk(self, replica: str, key: int) -> bool:
        return key in self._held.get(replica, _NOTHING).chunks or self._is_expected(replica, key)

    def _has_prefix(self, replica: str, key: int) -> bool:
        return key in self._held.get(replica, _NOTHING).prefixes or self._is_expected(replica, key)

    def _is_expected(self, replica: str, key: int) -> bool:
        expected = self._expected.get(replica)
        return expected is not None and expected.get(key, float("-inf")) > self._now_s()


_NOTHING = Held()


def rendezvous_weight(key: int, replica: str) -> int:
    """Return the weight of a replica for a key: the replica with the greatest one has the key.

    When a replica comes or goes, only its own keys move.
    """
    # The finaliser of splitmix64: quick, and the same in every process.
    value = (_hashed(replica) ^ key * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(4096)
def _hashed(replica: str) -> int:
    """Return the name's FNV-1a hash."""
    state = 0xCBF29CE484222325
    for byte in replica.encode():
        state = ((state ^ byte) * 0x100000001B3) & _MASK
    return state
