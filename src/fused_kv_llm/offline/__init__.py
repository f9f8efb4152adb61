"""Ingestion: every chunk of a corpus is prefilled once."""

from __future__ import annotations

from .preprocess import Ingestor

__all__ = ["Ingestor"]
