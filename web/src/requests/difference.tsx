// The reports of two requests side by side, with what differs.
import { ask } from "../api/client";
import { Busy, Button, Notice, Panel } from "../components/base";
import { keepFocus } from "../components/focus";
import { useResource } from "../components/resource";
import type { Detail, Report } from "../detail/types";
import { bytes, count, seconds } from "../format";
import { hrefOf } from "../router";

type Kept = Detail & { id: string; question: string | null };

interface Line {
  name: string;
  one: string;
  other: string;
  /** The second one's minus the first's, in words; empty where that means nothing. */
  change: string;
  differs: boolean;
}

export function ReportDifference({ ids, onClose }: { ids: [string, string]; onClose: () => void }) {
  const load = (signal: AbortSignal) =>
    Promise.all(ids.map((id) => ask<Kept>(`/v1/requests/${encodeURIComponent(id)}`, { signal })));
  const { data, error } = useResource(load, ids);
  return (
    <Panel title="Two requests compared" actions={<Button onClick={() => (keepFocus("table.requests input"), onClose())}>Close</Button>} class="difference">
      {error && <Notice tone="bad">{error}</Notice>}
      {!data && !error && <Busy>Loading both reports</Busy>}
      {data && <Lines kept={data as [Kept, Kept]} />}
    </Panel>
  );
}

function Lines({ kept: [one, other] }: { kept: [Kept, Kept] }) {
  if (!one.report || !other.report) return <p class="body">One of them has no report: it was refused or failed.</p>;
  return (
    <div class="scroll-x" tabIndex={0} role="region" aria-label="Differences of the reports">
      <table>
        <thead>
          <tr>
            <th scope="col">Figure</th>
            {[one, other].map((kept) => (
              <th scope="col" class="number" key={kept.id}>
                <a href={hrefOf("requests", kept.id)}>{kept.question ?? kept.id}</a>
              </th>
            ))}
            <th scope="col" class="number">Change</th>
          </tr>
        </thead>
        <tbody>
          {differences(one.report, other.report).map(({ name, one, other, change, differs }) => (
            <tr key={name} class={differs ? "differs" : "muted"}>
              <th scope="row">{name}</th>
              <td class="number">{one}</td>
              <td class="number">{other}</td>
              <td class="number">{differs ? change || "differs" : "="}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Return a line for everything that two reports say, the same or not. */
export function differences(one: Report, other: Report): Line[] {
  const tiers = union(one.bytes_loaded, other.bytes_loaded);
  const stages = union(one.seconds, other.seconds);
  return [
    words("Selector", one.selector, other.selector),
    number("Recompute ratio", one.recompute_ratio, other.recompute_ratio, (value) => String(+value.toFixed(3))),
    ...COUNTS.map(([name, field]) => number(name, one[field], other[field], count)),
    number("First token", one.ttft_s, other.ttft_s, seconds),
    ...stages.map((stage) => number(`Stage ${stage}`, one.seconds[stage] ?? 0, other.seconds[stage] ?? 0, seconds)),
    ...tiers.map((tier) => number(`KV from ${tier}`, one.bytes_loaded[tier] ?? 0, other.bytes_loaded[tier] ?? 0, bytes)),
    words("Verdicts", verdicts(one), verdicts(other)),
    words("Warnings", one.warnings.join(" ") || "none", other.warnings.join(" ") || "none"),
  ];
}

const COUNTS = [
  ["Prompt tokens", "prompt_tokens"],
  ["Prefix tokens", "prefix_tokens"],
  ["Reused tokens", "reused_tokens"],
  ["Recomputed tokens", "recomputed_tokens"],
  ["Fresh tokens", "fresh_tokens"],
  ["Answered tokens", "completion_tokens"],
  ["Chunks found", "chunks_found"],
  ["Chunks that could not be used", "chunks_missed"],
] as const;

function number(name: string, one: number, other: number, write: (value: number) => string): Line {
  const change = other - one;
  const sign = change < 0 ? "−" : "+";
  return { name, one: write(one), other: write(other), change: sign + write(Math.abs(change)), differs: change !== 0 };
}

function words(name: string, one: string, other: string): Line {
  return { name, one, other, change: "", differs: one !== other };
}

function union(one: Record<string, number>, other: Record<string, number>): string[] {
  return [...new Set([...Object.keys(one), ...Object.keys(other)])];
}

function verdicts({ verdicts }: Report): string {
  const counts = new Map<string, number>();
  for (const { outcome } of verdicts) counts.set(outcome, (counts.get(outcome) ?? 0) + 1);
  return [...counts].map(([outcome, times]) => `${outcome} ${times}`).join(", ") || "none";
}
