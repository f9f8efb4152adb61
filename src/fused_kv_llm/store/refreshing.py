"""Looking again and again for what other machines have changed on a remote tier, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fused_kv_llm.errors import ConfigError, StoreError
from fused_kv_llm.store.damage import warn

__all__ = ["Refreshing"]


class Refreshing:
    """Calls something every so many seconds until it is closed; that it fails is warned about once a time.

    Parameters
    ----------
    refresh : callable
    every_s : float
        Seconds between the end of one call and the next.

    Raises
    ------
    ConfigError
        `every_s` is not a positive number.
    """

    def __init__(self, refresh: Callable[[], object], every_s: float) -> None:
        if isinstance(every_s, bool) or not isinstance(every_s, (int, float)) or not every_s > 0:
            raise ConfigError(f"refresh_s={every_s!r} is not a positive number of seconds")
        self._refresh, self._every_s, self._closed = refresh, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="fused-kv-refresh", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, after a call under way."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        is_away = False
        while not self._closed.wait(self._every_s):
            try:
                self._refresh()
                is_away = False
            except Exception as error:  # the thread must not end
                if not is_away:
                    what = str(error) if isinstance(error, StoreError) else repr(error)
                    warn(f"What other machines have changed in the shared store is not known: {what}")
                is_away = True
