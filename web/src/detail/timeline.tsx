// When each stage of a request began and ended.

import { Panel } from "../components/base";
import { seconds } from "../format";
import type { Report, Stage } from "./types";

export function Timeline({ report }: { report: Report }) {
  const stages = report.timeline ?? [];
  return (
    <Panel title="Timeline">
      <div class="body">
        {stages.length ? <Bars stages={stages} ttft={report.ttft_s} /> : <Durations report={report} />}
      </div>
    </Panel>
  );
}

function Bars({ stages, ttft }: { stages: Stage[]; ttft: number }) {
  const start = Math.min(0, ...stages.map((stage) => stage.start_s));
  const end = Math.max(ttft, ...stages.map((stage) => stage.end_s), start + 1e-9);
  const share = (length: number) => `${(100 * length) / (end - start)}%`;
  return (
    <ul class="timeline">
      {byStage(stages).map(([stage, parts]) => (
        <li key={stage}>
          <span class="timeline-name">{stage.replace(/_/g, " ")}</span>
          <span class="timeline-track" aria-hidden="true">
            {parts.map((part, number) => (
              <i key={number} style={{ left: share(part.start_s - start), width: share(part.end_s - part.start_s) }} />
            ))}
          </span>
          <span class="figure" title={parts.map((part) => `${seconds(part.start_s)} to ${seconds(part.end_s)}`).join(", ")}>
            {seconds(parts.reduce((sum, part) => sum + part.end_s - part.start_s, 0))}
            <span class="unseen">, beginning {seconds(parts[0]!.start_s)} after the call</span>
          </span>
        </li>
      ))}
      <li class="timeline-total">
        <span class="timeline-name">first token</span>
        <span class="timeline-track" aria-hidden="true">
          <i style={{ left: share(-start), width: share(ttft) }} />
        </span>
        <span class="figure">{seconds(ttft)}</span>
      </li>
    </ul>
  );
}

/** A stage may have been left for other requests' steps: its parts are one row. */
function byStage(stages: Stage[]): [string, Stage[]][] {
  const rows = new Map<string, Stage[]>();
  for (const stage of stages) rows.set(stage.stage, [...(rows.get(stage.stage) ?? []), stage]);
  return [...rows];
}

/** Reports of earlier versions know how long stages took, and not when they began. */
function Durations({ report }: { report: Report }) {
  const stages = Object.entries(report.seconds).filter(([stage]) => stage !== "step" && stage !== "first_token");
  return (
    <dl class="figures">
      {[...stages, ["first token", report.ttft_s] as const].map(([stage, value]) => (
        <div>
          <dt>{stage.replace(/_/g, " ")}</dt>
          <dd>{seconds(value)}</dd>
        </div>
      ))}
    </dl>
  );
}
