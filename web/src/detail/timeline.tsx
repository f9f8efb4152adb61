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
  // What a search's guess had computed was done before the call.
  const begin = Math.min(0, ...stages.map((stage) => stage.start_s));
  const end = Math.max(ttft, ...stages.map((stage) => stage.end_s), begin + 1e-9);
  const left = (at: number) => `${((at - begin) / (end - begin)) * 100}%`;
  const width = (long: number) => `${(long / (end - begin)) * 100}%`;
  return (
    <ul class="timeline">
      {[...new Set(stages.map(({ stage }) => stage))].map((name) => {
        const parts = stages.filter(({ stage }) => stage === name);
        const from = Math.min(...parts.map((part) => part.start_s));
        const to = Math.max(...parts.map((part) => part.end_s));
        const total = parts.reduce((sum, part) => sum + part.end_s - part.start_s, 0);
        return (
          <li key={name}>
            <span class="timeline-name">{name.replace(/_/g, " ")}</span>
            <span class="timeline-track" aria-hidden="true">
              {parts.map(({ start_s, end_s }) => (
                <i key={start_s} style={{ left: left(start_s), width: width(end_s - start_s) }} />
              ))}
            </span>
            <span class="figure" title={`between ${seconds(from)} and ${seconds(to)} after the call`}>
              {seconds(total)}
              <span class="unseen">, beginning {seconds(from)} after the call</span>
            </span>
          </li>
        );
      })}
      <li class="timeline-total">
        <span class="timeline-name">first token</span>
        <span class="timeline-track" aria-hidden="true">
          <i style={{ left: left(0), width: width(ttft) }} />
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
