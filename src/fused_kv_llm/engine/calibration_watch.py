"""Tells when ``recompute_ratio="auto"`` rests on a calibration that the corpus has outgrown."""

from __future__ import annotations

import logging
import threading
import time
import warnings

from fused_kv_llm.errors import FusedKVWarning, StoreError
from fused_kv_llm.store import KVStore

from .calibration import Calibration
from .corpus_state import corpus_changes, read_corpus_state

__all__ = ["CalibrationWatch"]

_LOOK_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class CalibrationWatch:
    """Compares a calibration with the present corpus; thread-safe.

    It looks at most once a minute, in the caller's thread, and takes milliseconds. Of each calibration it warns once.

    Parameters
    ----------
    store : KVStore
    identity : str
        Of the chunks.
    sidecar : str or None
        Name of the sidecars that preprocessing makes; None if it is not used.
    """

    def __init__(self, store: KVStore, identity: str, sidecar: str | None) -> None:
        self._store, self._identity, self._sidecar = store, identity, sidecar
        self._lock = threading.Lock()
        self._seen: Calibration | None = None
        self._looked_s, self._has_warned = float("-inf"), False

    def changes(self, calibration: Calibration) -> list[str]:
        """Return why a calibration may not hold any more, see :func:`.corpus_changes`; empty if nothing speaks so."""
        then = calibration.made_on
        if then is None:
            return ["it does not say what it was made on, as those of version 0.1 do not"]
        now = read_corpus_state(self._store, self._identity, self._sidecar, calibration.resolved(), then)
        return corpus_changes(then, now)

    def warning(self, calibration: Calibration) -> str | None:
        """Look whether a calibration still holds, and return a warning for a request's report.

        Returns
        -------
        str or None
            A ``FusedKVWarning`` has been issued with it. None if all is well, or it was said before.
        """
        with self._lock:
            if calibration != self._seen:
                self._seen, self._looked_s, self._has_warned = calibration, float("-inf"), False
            if self._has_warned or time.monotonic() - self._looked_s < _LOOK_EVERY_S:
                return None
            self._looked_s = time.monotonic()
            try:
                changes = self.changes(calibration)
            except StoreError as error:
                # It is advice only: a request needs nothing of it.
                _log.warning("Whether the calibration still holds could not be looked up: %s", error)
                return None
            if not changes:
                return None
            self._has_warned = True
        text = (
            f"recompute_ratio='auto' ({calibration.recompute_ratio:g}) may not be right any more for the corpus in "
            f"{self._store.kv_dir}: {'; '.join(changes)}. Run: fused-kv calibrate --kv-dir {self._store.kv_dir}"
        )
        warnings.warn(text, FusedKVWarning, stacklevel=4)
        return text
