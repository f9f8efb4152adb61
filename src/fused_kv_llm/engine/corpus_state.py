"""What a calibration was made on, and what has changed since: the corpus, its preprocessing, the rule.

A chunk's key is a hash, so the keys up to a certain one are a random sample of the corpus, and stay one when chunks
come and go: new chunks get their share of new keys below it. A few hundred keys are enough to notice that a fifth of
the chunks are others, whatever the size of the corpus, and reading them takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module

from fused_kv_llm.selectors import Selector
from fused_kv_llm.store import KVStore

__all__ = ["CorpusState", "corpus_changes", "read_corpus_state"]

_SAMPLE = 256
_ALL_KEYS = "f" * 64
_SHORT = 16
_MATERIAL = 0.2


@dataclass(frozen=True, slots=True)
class CorpusState:
    """What a store held for one identity, and by which rule its chunks were fused.

    Parameters
    ----------
    chunks : int
        About how many; exactly where the state is that of a calibration.
    up_to : str
        The highest key of the sample, hexadecimal: all of the identity's keys up to it are in the sample.
    sample : sequence of str
        The beginnings of these keys, ascending. They say nothing of the texts.
    preprocessed : float
        Share of the sample that is preprocessed; 1 where no preprocessing is used.
    rule : str
        The selector with its parameters.
    library : str
        Version of this library.
    made_at : str
        UTC, ISO 8601.
    """

    chunks: int
    up_to: str
    sample: Sequence[str]
    preprocessed: float
    rule: str
    library: str
    made_at: str


def read_corpus_state(
    store: KVStore, identity: str, sidecar: str | None, selector: Selector, then: CorpusState | None = None
) -> CorpusState:
    """Read the present state of a corpus.

    Parameters
    ----------
    store : KVStore
    identity : str
        Whose chunks: those of one model and one tenant.
    sidecar : str or None
        Name of the sidecars that preprocessing makes; None if it is not used.
    selector : Selector
        The rule.
    then : CorpusState or None
        An earlier state to be compared with, whose sample is looked up again; None lists all keys for a new sample.
    """
    if then is None:
        every = sorted(store.keys(identity))
        up_to = every[_SAMPLE - 1] if len(every) > _SAMPLE else _ALL_KEYS
        keys, chunks = every[:_SAMPLE], len(every)
    else:
        up_to, keys = then.up_to, store.keys_up_to(identity, then.up_to)
        chunks = round(then.chunks * len(keys) / max(1, len(then.sample)))
    made = len(keys) if sidecar is None else sum(sidecar in store.sidecars.names(key) for key in keys)
    return CorpusState(
        chunks,
        up_to,
        [key[:_SHORT] for key in keys],
        made / max(1, len(keys)),
        repr(selector),
        _version(),
        datetime.now(UTC).isoformat(timespec="seconds"),
    )


def corpus_changes(then: CorpusState, now: CorpusState) -> list[str]:
    """Return what has changed so much between two states that a calibration may not hold any more.

    Parameters
    ----------
    then, now : CorpusState
        The later one with the sample of the earlier one, see :func:`read_corpus_state`.

    Returns
    -------
    list of str
        Parts of a sentence. Empty if less than a fifth of the chunks are others, or are preprocessed now and were not,
        and the rule and the library's minor version are the same.
    """
    before, after = set(then.sample), set(now.sample)
    gone, new = len(before - after) / max(1, len(before)), len(after - before) / max(1, len(after))
    changes = []
    if gone > _MATERIAL:
        changes.append(f"about {gone:.0%} of its chunks are gone")
    if new > _MATERIAL:
        changes.append(f"about {new:.0%} of the chunks are new")
    if abs(now.preprocessed - then.preprocessed) > _MATERIAL:
        changes.append(
            f"about {now.preprocessed:.0%} of the chunks are preprocessed, and {then.preprocessed:.0%} were then"
        )
    if now.rule != then.rule:
        changes.append(f"the rule was {then.rule} then and is {now.rule}")
    if _minor(now.library) != _minor(then.library):
        changes.append(f"it was made by version {then.library} of the library, and this is {now.library}")
    return changes


def _version() -> str:
    # By its name: the package's own module imports this one's room.
    version: str = import_module("fused_kv_llm").__version__
    return version


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
