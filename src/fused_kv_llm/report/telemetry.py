"""OpenTelemetry spans of a request and its stages, where ``opentelemetry-api`` is installed and configured.

Without the package, or without a tracer provider, every function here does next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

try:
    from opentelemetry import context as _context
    from opentelemetry import trace as _trace
    from opentelemetry.propagate import extract as _extract
except ImportError:
    _trace = None  # type: ignore[assignment, unused-ignore]

__all__ = ["RequestSpan", "remote_parent", "stage_span"]

_PREFIX = "fused_kv"


@contextmanager
def stage_span(stage: str) -> Iterator[None]:
    """Trace a stage as a child of the current span.

    Parameters
    ----------
    stage : str
        For example ``"probe"``; the span is called ``"fused_kv.probe"``.
    """
    if _trace is None:
        yield
        return
    with _trace.get_tracer(_PREFIX).start_as_current_span(f"{_PREFIX}.{stage}"):
        yield


@contextmanager
def remote_parent(headers: Mapping[str, str]) -> Iterator[None]:
    """Make the spans that begin in a block children of the one that a caller names, in ``traceparent`` or alike.

    Parameters
    ----------
    headers : mapping of str to str
        Of an HTTP request.
    """
    if _trace is None:
        yield
        return
    token = _context.attach(_extract(headers))
    try:
        yield
    finally:
        _context.detach(token)


class RequestSpan:
    """The span of one request, from the call to the last token.

    A request is worked on by several threads and beside others, and streams: its span must not stay the current one, or
    the spans of others would become its children. So its stages are current only inside :meth:`within`.

    Parameters
    ----------
    model_id : str
    """

    def __init__(self, model_id: str) -> None:
        self._span: Any = None
        if _trace is not None:
            attributes = {"gen_ai.request.model": model_id}
            self._span = _trace.get_tracer(_PREFIX).start_span(f"{_PREFIX}.request", attributes=attributes)

    @contextmanager
    def within(self, child: Any, stage: str | None = None) -> Iterator[None]:
        """Make a child of :meth:`start` the current span of this block, or a stage of it."""
        if child is None or _trace is None:
            yield
            return
        with _trace.use_span(child, end_on_exit=False), stage_span(stage) if stage else nullcontext():
            yield

    def start(self, stage: str, parent: Any = None) -> Any:
        """Start a child, of this span or of another child, that is not the current span; end it with its ``end()``.

        None without OpenTelemetry.
        """
        if self._span is None or _trace is None:
            return None
        context = _trace.set_span_in_context(parent or self._span)
        return _trace.get_tracer(_PREFIX).start_span(f"{_PREFIX}.{stage}", context=context)

    def end(self, report: dict[str, Any] | None = None) -> None:
        """End the span with the numbers of a report as its attributes."""
        if self._span is None:
            return
        for name, value in (report or {}).items():
            if isinstance(value, (int, float, str)):
                self._span.set_attribute(f"{_PREFIX}.{name}", value)
        self._span.end()
