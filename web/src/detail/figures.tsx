// What a request computed and loaded, beside a full prefill that is measured when asked for.

import { useState } from "preact/hooks";
import { Button, Panel } from "../components/base";
import { keepFocus } from "../components/focus";
import { StateBar } from "../components/states";
import { bytes, count, percent, plural, seconds } from "../format";
import type { Report } from "./types";
import type { Actions } from "./verdict";

/** The request in one sentence and one bar. */
export function Summary({ report }: { report: Report }) {
  const computed = report.recomputed_tokens + report.fresh_tokens;
  return (
    <div class="request-summary">
      <p class="headline">
        <b>{count(computed)}</b> of {count(report.prompt_tokens)} prompt tokens were computed (
        {percent(computed, report.prompt_tokens)}); first token after <b>{seconds(report.ttft_s)}</b>
      </p>
      <StateBar counts={report} />
    </div>
  );
}

export function Figures({ report, actions }: { report: Report; actions?: Actions | undefined }) {
  return (
    <Panel title="Cost">
      <div class="stack">
      <FullPrefill report={report} actions={actions} />
      <dl class="figures">
        <Row name="Selector" value={report.selector || "none"} />
        <Row name="Recompute ratio" value={String(+report.recompute_ratio.toFixed(3))} />
        <Row name="Answer" value={plural(report.completion_tokens, "token")} />
        {report.seconds["step"] ? <Row name="Per token" value={seconds(report.seconds["step"])} /> : null}
        {report.retries ? <Row name="Computed again after a failure" value={count(report.retries)} /> : null}
      </dl>
      </div>
    </Panel>
  );
}

/** Where the KV came from and how much memory the request had. */
export function Storage({ report }: { report: Report }) {
  const tiers = Object.entries(report.bytes_loaded);
  const sidecars = Object.entries(report.sidecar_bytes_loaded ?? {});
  return (
    <Panel title="Storage and memory">
      <div class="stack">
      <dl class="figures">
        {tiers.map(([tier, loaded]) => <Row name={`KV from ${tier}`} value={bytes(loaded)} />)}
        {tiers.length === 0 && <Row name="KV loaded" value="none" />}
        {sidecars.map(([kind, loaded]) => <Row name={kind.replace(/_/g, " ")} value={bytes(loaded)} />)}
        <Row name="Seen by the selector" value={bytes(report.selection_bytes ?? 0)} />
        <Row name="KV of its own in memory" value={bytes(report.own_kv_bytes)} />
        <Row name="KV shared with others" value={bytes(report.shared_kv_bytes)} />
      </dl>
      {report.not_shared && <p class="dim">Not shared: {report.not_shared}</p>}
      </div>
    </Panel>
  );
}

export function Row({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function FullPrefill({ report, actions }: { report: Report; actions?: Actions | undefined }) {
  const [measured, setMeasured] = useState<number | null>(null);
  const [said, say] = useState("");
  const ask = actions?.measure;
  if (!ask) return null;
  const measure = async () => {
    say("Measuring…");
    try {
      const asked = ask();
      keepFocus(".measured", asked);
      setMeasured(await asked);
      say("");
    } catch (error) {
      say(`Not measured: ${error instanceof Error ? error.message : String(error)}`);
    }
  };
  return (
    <div class="measure">
      {measured == null ? (
        <Button busy={said === "Measuring…"} onClick={measure}>
          Measure a full prefill
        </Button>
      ) : (
        <Against report={report} full={measured} />
      )}
      <span role="status">{said}</span>
    </div>
  );
}

function Against({ report, full }: { report: Report; full: number }) {
  const longest = Math.max(full, report.ttft_s);
  const bar = (name: string, value: number, tokens: number) => (
    <li>
      <span class="timeline-name">{name}</span>
      <span class="timeline-track" aria-hidden="true">
        <i style={{ left: "0", width: `${(value / longest) * 100}%` }} />
      </span>
      <span class="figure">{seconds(value)}</span>
      <span class="dim timeline-under">{count(tokens)} tokens computed</span>
    </li>
  );
  return (
    <div class="measured" role="status" tabIndex={-1}>
      <ul class="timeline">
        {bar("this request", report.ttft_s, report.recomputed_tokens + report.fresh_tokens)}
        {bar("full prefill", full, report.prompt_tokens)}
      </ul>
      <p class="dim">
        Measured now, with this server’s load: {(full / Math.max(report.ttft_s, 1e-9)).toFixed(1)} times this request’s
        time to the first token.
      </p>
    </div>
  );
}
