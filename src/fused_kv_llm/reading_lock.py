"""One model is read at a time.

While transformers reads a model, it replaces methods that all models inherit and puts them back afterwards. Two threads
that do so at once may put back each other's replacement: from then on, models in the process share no weights between
input and output, and reading them fails.
"""

from __future__ import annotations

import threading

__all__ = ["READING"]

READING = threading.RLock()
"""Held while transformers, or something on top of it, reads a model from files."""
