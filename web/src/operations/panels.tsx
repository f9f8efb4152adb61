// The figures of /v1/operations: requests, tokens, misses, storage.
import { Panel, Stat } from "../components/base";
import { outcomeWords } from "../components/outcome";
import { StateBar } from "../components/states";
import { bytes, count, percent, plural, seconds } from "../format";
import { hrefOf } from "../router";
import { Tenants } from "./tenants";
import type { Operations, Period, Tier } from "./types";

export function Panels({ operations }: { operations: Operations }) {
  const { since_start: total, recent } = operations;
  return (
    <>
      <div class="operations-pair">
        <PeriodPanel title="Recent" period={recent} />
        <PeriodPanel title="Since the start" period={total} />
      </div>
      <div class="operations-pair">
        <Outcomes recent={recent.verdicts} total={total.verdicts} />
        <Storage operations={operations} />
      </div>
      {operations.tenants && <Tenants rows={operations.tenants} />}
    </>
  );
}

function PeriodPanel({ title, period }: { title: string; period: Period }) {
  const { requests, ttft_s, tokens, saved } = period;
  const all = Object.values(requests).reduce((sum, times) => sum + times, 0);
  const statuses = Object.entries(requests).map(([status, times]) => `${status}: ${times}`).join(", ");
  const counts = {
    prefix_tokens: tokens.header + tokens.prefix,
    reused_tokens: tokens.chunk,
    recomputed_tokens: tokens.recomputed,
    fresh_tokens: tokens.fresh,
  };
  const unknown = saved.requests_unknown ? `; not known of ${plural(saved.requests_unknown, "request")}` : "";
  return (
    <Panel title={title}>
      <div class="stack">
        <dl class="stats">
          <Stat name="Requests" value={count(all)} hint={statuses} />
          <Stat name="Not answered" value={count(all - (requests["ok"] ?? 0))} hint={statuses} />
          <Stat name="First token, p50" value={seconds(ttft_s.p50)} />
          <Stat name="First token, p95" value={seconds(ttft_s.p95)} />
          <Stat name="Chunk hit rate" value={rate(period.hit_rates?.chunk)} hint="Prompt tokens whose stored KV was used as it is" />
          <Stat name="Prefix hit rate" value={rate(period.hit_rates?.prefix)} hint="Prompt tokens that earlier requests had left" />
          <Stat name="Saved, estimated" value={all > 0 && saved.requests_unknown >= all ? "not known" : seconds(saved.saved_s)} hint={`Against computing the reused tokens${unknown}`} />
        </dl>
        <StateBar counts={counts} />
      </div>
    </Panel>
  );
}

const rate = (share: number | null | undefined) => (share == null ? "–" : percent(share, 1));

function Outcomes({ recent, total }: { recent: Record<string, number>; total: Record<string, number> }) {
  const all = Object.values(total).reduce((sum, times) => sum + times, 0);
  const outcomes = Object.keys(total).sort((one, other) => total[other]! - total[one]!);
  return (
    <Panel title="What became of chunks">
      {outcomes.length === 0 ? (
        <p class="body muted">No request has had a chunk yet.</p>
      ) : (
        <table>
          <thead>
            <tr>
              <th scope="col">Outcome</th>
              <th scope="col" class="number">
                Recent
              </th>
              <th scope="col" class="number">
                Since the start
              </th>
              <th scope="col" class="number">
                Share
              </th>
            </tr>
          </thead>
          <tbody>
            {outcomes.map((outcome) => (
              <tr key={outcome}>
                <td>
                  <a href={hrefOf("requests", "", { verdict: outcome })}>{outcomeWords(outcome)}</a>
                </td>
                <td class="number">{count(recent[outcome] ?? 0)}</td>
                <td class="number">{count(total[outcome])}</td>
                <td class="number">{percent(total[outcome]!, all)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Panel>
  );
}

function Storage({ operations: { running, waiting, store } }: { operations: Operations }) {
  const evicted = Object.values(store.evictions).reduce((sum, chunks) => sum + chunks, 0);
  const byTier = Object.entries(store.evictions).map(([tier, chunks]) => `${tier}: ${chunks}`).join(", ");
  return (
    <Panel title="Load and storage">
      <div class="stack">
        <dl class="stats">
          {running !== undefined && <Stat name="Running" value={count(running)} />}
          {waiting !== undefined && <Stat name="Waiting" value={count(waiting)} />}
          <Stat name="Evictions" value={count(evicted)} hint={byTier} />
          <Stat name="Damaged files" value={count(store.damaged)} />
        </dl>
        <ul class="stack">
          {Object.entries(store.tiers).map(([name, tier]) => (
            <TierRow key={name} name={name} tier={tier} />
          ))}
        </ul>
      </div>
    </Panel>
  );
}

function TierRow({ name, tier }: { name: string; tier: Tier }) {
  const budget = tier.budget_bytes;
  const used = budget ? `${bytes(tier.bytes)} of ${bytes(budget)} (${percent(tier.bytes, budget)})` : bytes(tier.bytes);
  return (
    <li>
      <div class="row">
        <b class="grow">{name}</b>
        <span>
          {plural(tier.chunks, "chunk")}, {used}
        </span>
      </div>
      {budget ? <meter aria-label={`${name}, used share`} min={0} max={budget} high={budget * 0.9} value={tier.bytes} /> : null}
    </li>
  );
}
