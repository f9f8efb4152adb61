"""The rooms of ``benchmarks/quality.py``: questions, one question's measurement, records, summary, pictures."""

from __future__ import annotations
