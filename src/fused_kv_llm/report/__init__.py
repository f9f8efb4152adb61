"""What one request or one ingestion did: counts, bytes, seconds, the traced prompt, HTML, telemetry."""

from __future__ import annotations

from fused_kv_llm.report.fusion_report import FusionReport
from fused_kv_llm.report.ingest_report import IngestReport
from fused_kv_llm.report.support import Support, Unsupported, lexical_support
from fused_kv_llm.report.telemetry import RequestSpan, remote_parent, stage_span
from fused_kv_llm.report.timeline import StageTime
from fused_kv_llm.report.trace import PromptTrace, SelectionTrace
from fused_kv_llm.report.verdict import Outcome, Verdict

__all__ = [
    "FusionReport",
    "IngestReport",
    "Outcome",
    "PromptTrace",
    "RequestSpan",
    "SelectionTrace",
    "StageTime",
    "Support",
    "Unsupported",
    "Verdict",
    "lexical_support",
    "remote_parent",
    "stage_span",
]
