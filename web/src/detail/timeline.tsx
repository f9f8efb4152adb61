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
  const end = Math.max(ttft, ...stages.map((stage) => stage.end_s), 1e-9);
  return (
    <ul class="timeline">
      {stages.map(({ stage, start_s, end_s }) => (
        <li>
          <span class="timeline-name">{stage.replace(/_/g, " ")}</span>
          <span class="timeline-track" aria-hidden="true">
            <i style={{ left: `${(start_s / end) * 100}%`, width: `${((end_s - start_s) / end) * 100}%` }} />
          </span>
          <span class="figure" title={`from ${seconds(start_s)} to ${seconds(end_s)} after the call`}>
            {seconds(end_s - start_s)}
            <span class="unseen">, beginning {seconds(start_s)} after the call</span>
          </span>
        </li>
      ))}
      <li class="timeline-total">
        <span class="timeline-name">first token</span>
        <span class="timeline-track" aria-hidden="true">
          <i style={{ left: "0", width: `${(ttft / end) * 100}%` }} />
        </span>
        <span class="figure">{seconds(ttft)}</span>
      </li>
    </ul>
  );
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
