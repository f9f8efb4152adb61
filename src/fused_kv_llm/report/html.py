"""One request as a self-contained piece of HTML, for notebooks and for a file to open in a browser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from fused_kv_llm.report.trace import PromptTrace, Run, TokenState

__all__ = ["report_to_html"]

_BEGINNING_CHARS = 90
_STATES: dict[TokenState, str] = {
    "prefix": "header, exact KV at hand",
    "reused": "chunk, stored KV reused",
    "recomputed": "chunk, recomputed",
    "fresh": "fresh text, computed",
}
_SIDES = {"context_shift": "context shifts", "anchors": "anchors"}
_STAGES = ("align", "load", "probe", "select", "fuse")
_DARK = """--paper:#1b2129;--ink:#dde4eb;--dim:#9aa7b4;--line:#364250;--track:#2b343f;--sheet:#151a20;--alarm:#4a3a1c;
--prefix:#7d8894;--reused:#3f9e61;--recomputed:#d98a2b;--fresh:#5590de;--stage:#8292e6;--total:#c3cede"""
_STYLE = f"""
.fkv{{--paper:#fff;--ink:#1d2733;--dim:#566270;--line:#d5dbe1;--track:#eef1f4;--sheet:#fafbfc;--alarm:#fff4e0;
--prefix:#9aa3ad;--reused:#3c9d5d;--recomputed:#e0912f;--fresh:#4a86d8;--stage:#6b7fd7;--total:#2f3e57;
font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);border:1px solid var(--line);
border-radius:8px;padding:16px;max-width:980px;box-sizing:border-box}}
@media(prefers-color-scheme:dark){{.fkv{{{_DARK}}}}}
[data-jp-theme-light=false] .fkv,.vscode-dark .fkv{{{_DARK}}}
.fkv *{{box-sizing:border-box}}
.fkv h4{{margin:16px 0 6px;font-size:13px;text-transform:uppercase;letter-spacing:.04em;color:var(--dim)}}
.fkv .big{{font-size:18px;margin:0 0 8px}}
.fkv .bar{{display:flex;height:14px;border-radius:4px;overflow:hidden;background:var(--track)}}
.fkv .bar i{{display:block;height:100%}}
.fkv .row{{display:grid;grid-template-columns:minmax(0,2fr) minmax(0,3fr) 10em;gap:2px 10px;align-items:center;
margin:3px 0;font-size:12.5px}}
.fkv .row span:first-child{{white-space:nowrap;overflow:hidden;text-overflow:ellipsis}}
.fkv .row span:last-child{{text-align:right;font-variant-numeric:tabular-nums}}
@media(max-width:560px){{.fkv{{padding:12px}}.fkv .row{{grid-template-columns:minmax(0,1fr) auto;margin:7px 0}}
.fkv .row .bar{{grid-row:2;grid-column:1/3;height:10px}}}}
.fkv .key{{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:12.5px;margin:6px 0 0}}
.fkv .key b{{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px}}
.fkv .prefix{{--c:var(--prefix)}}.fkv .reused{{--c:var(--reused)}}.fkv .recomputed{{--c:var(--recomputed)}}
.fkv .fresh{{--c:var(--fresh)}}.fkv .stage{{--c:var(--stage)}}.fkv .total{{--c:var(--total)}}
.fkv i,.fkv .key b{{background:var(--c)}}
.fkv pre{{white-space:pre-wrap;overflow-wrap:anywhere;font:12.5px/1.6 ui-monospace,monospace;background:var(--sheet);
border:1px solid var(--line);border-radius:6px;padding:10px;max-height:420px;overflow:auto;color:var(--ink);margin:0}}
.fkv pre span{{background:color-mix(in srgb,var(--c) 27%,transparent)}}
.fkv .warn{{background:var(--alarm);border-radius:6px;padding:6px 10px;margin:8px 0 0;font-size:13px}}
""".strip()


def report_to_html(report: Mapping[str, Any], trace: PromptTrace | None = None) -> str:
    """Return a request's report as HTML.

    Parameters
    ----------
    report : mapping
        What ``FusionReport.to_dict()`` returned, also as frameworks hand it on.
    trace : PromptTrace or None
        For the bars per chunk and the coloured prompt.

    Returns
    -------
    str
        One ``<div>`` with its own style: the shares of the prompt's tokens, a bar per chunk, a bar per stage, and
        the prompt itself with its tokens coloured, light or dark as the page is. All text is escaped, in ASCII, so that
        a file of it needs no declared encoding.
    """
    parts = [_summary(report), _shares(report)]
    if trace is not None:
        parts.append(_chunks(trace.chunks()))
    parts.append(_stages(report))
    if trace is not None:
        parts.append(f"<h4>Prompt</h4><pre>{''.join(map(_coloured, trace.runs()))}</pre>")
    parts += [f'<div class="warn">{escape(warning)}</div>' for warning in report["warnings"]]
    html = f'<div class="fkv"><style>{_STYLE}</style>{"".join(parts)}</div>'
    return html.encode("ascii", "xmlcharrefreplace").decode()


def _summary(report: Mapping[str, Any]) -> str:
    share = report["reused_tokens"] / max(report["prompt_tokens"], 1)
    loaded = [f"{nbytes / 1e6:.1f} MB of KV from {escape(tier)}" for tier, nbytes in report["bytes_loaded"].items()]
    loaded += [
        f"{nbytes / 1e6:.1f} MB of {_SIDES.get(kind, escape(kind))}"
        for kind, nbytes in report["sidecar_bytes_loaded"].items()
    ]
    missing = len(report["unmatched"])
    details = [
        f"{report['chunks_found']} chunks found, {report['chunks_missed']} unusable, {missing} retrieved but not there",
        f"selector {escape(report['selector'])}, ratio {report['recompute_ratio']:g}",
        *([", ".join(loaded)] if loaded else []),
        f"{report['completion_tokens']} tokens answered",
    ]
    return (
        f'<p class="big"><b>{share:.0%}</b> of {report["prompt_tokens"]:,} prompt tokens came from the stored KV of '
        f"chunks; first token after <b>{report['ttft_s']:.3f} s</b></p><div>{'; '.join(details)}</div>"
    )


def _shares(report: Mapping[str, Any]) -> str:
    counts: dict[TokenState, int] = {
        "prefix": report["prefix_tokens"],
        "reused": report["reused_tokens"],
        "recomputed": report["recomputed_tokens"],
        "fresh": report["fresh_tokens"],
    }
    total = max(report["prompt_tokens"], 1)
    bar = _bar((state, count / total) for state, count in counts.items())
    key = "".join(f'<span><b class="{state}"></b>{label}: {counts[state]:,}</span>' for state, label in _STATES.items())
    return f'<h4>Tokens</h4>{bar}<div class="key">{key}</div>'


def _chunks(chunks: list[tuple[str, int, int]]) -> str:
    if not chunks:
        return ""
    longest = max(reused + recomputed for _, reused, recomputed in chunks)
    rows = []
    for text, reused, recomputed in chunks:
        bar = _bar([("reused", reused / longest), ("recomputed", recomputed / longest)])
        beginning = escape(" ".join(text[:_BEGINNING_CHARS].split()))
        rows.append(_row(beginning, bar, f"{reused} + {recomputed} tokens"))
    return f"<h4>Chunks</h4>{''.join(rows)}"


def _stages(report: Mapping[str, Any]) -> str:
    seconds = {stage: report["seconds"][stage] for stage in _STAGES if stage in report["seconds"]}
    if not seconds:
        return ""
    longest = max(*seconds.values(), report["ttft_s"], 1e-9)
    rows = [_row(stage, _bar([("stage", s / longest)]), f"{s * 1000:.1f} ms") for stage, s in seconds.items()]
    rows.append(_row("first token", _bar([("total", report["ttft_s"] / longest)]), f"{report['ttft_s'] * 1000:.1f} ms"))
    return f"<h4>Time</h4>{''.join(rows)}"


def _bar(shares: Iterable[tuple[str, float]]) -> str:
    cells = "".join(f'<i class="{kind}" style="width:{share:.3%}"></i>' for kind, share in shares if share > 0)
    return f'<div class="bar">{cells}</div>'


def _row(label: str, bar: str, figure: str) -> str:
    return f'<div class="row"><span title="{label}">{label}</span>{bar}<span>{figure}</span></div>'


def _coloured(run: Run) -> str:
    where = run.state if run.chunk is None else f"{run.state}, chunk {run.chunk + 1}"
    return f'<span class="{run.state}" title="{where}">{escape(run.text)}</span>'
