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

    It has stages, one after the other, and a stage has slices. A request is worked on by several threads and beside
    others, and streams: its span must not stay the current one, or the spans of others would become its children. So a
    stage is current only inside :meth:`within`.

    Parameters
    ----------
    model_id : str
    stage : str
        The first one.
    """

    def __init__(self, model_id: str, stage: str) -> None:
        # All None without OpenTelemetry.
        self._span: Any = None
        self._stage: Any = None
        self._slice: Any = None
        if _trace is not None:
            attributes = {"gen_ai.request.model": model_id}
            self._span = _trace.get_tracer(_PREFIX).start_span(f"{_PREFIX}.request", attributes=attributes)
            self._stage = self._start(stage, self._span)

    @contextmanager
    def within(self, part: str | None = None) -> Iterator[None]:
        """Make the stage the current span of a block, or a part of the stage that is as long as the block."""
        if self._stage is None or _trace is None:
            yield
            return
        with _trace.use_span(self._stage, end_on_exit=False), stage_span(part) if part else nullcontext():
            yield

    def enter(self, stage: str) -> None:
        """End the stage and begin another."""
        if self._stage is not None:
            self._stage.end()
            self._stage = self._start(stage, self._span)

    def begin_slice(self) -> None:
        """Begin a slice of fusing, unless one has begun; it is never the current span."""
        if self._slice is None and self._stage is not None:
            self._slice = self._start("fuse", self._stage)

    def end_slice(self) -> None:
        """End the slice, if one has begun."""
        ended, self._slice = self._slice, None
        if ended is not None:
            ended.end()

    def end(self, report: dict[str, Any]) -> None:
        """End the span, its stage and slice, with the numbers of a report as its attributes."""
        if self._span is None:
            return
        self.end_slice()
        self._stage.end()
        for name, value in report.items():
            if isinstance(value, (int, float, str)):
                self._span.set_attribute(f"{_PREFIX}.{name}", value)
        self._span.end()

    @staticmethod
    def _start(stage: str, parent: Any) -> Any:
        return _trace.get_tracer(_PREFIX).start_span(f"{_PREFIX}.{stage}", context=_trace.set_span_in_context(parent))
