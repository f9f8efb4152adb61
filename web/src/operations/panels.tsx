// The figures of /v1/operations: requests, tokens, misses, storage, tenants.
import { Panel, Stat } from "../components/base";
import { StateBar } from "../components/states";
import { outcomeLabel } from "../detail/outcomes";
import { bytes, count, percent, seconds } from "../format";
import { hrefOf } from "../router";
import type { Operations, Period, Tier } from "./types";

export function Panels({ operations }: { operations: Operations }) {
  const { total, window, tenants } = operations;
  return (
    <>
      <div class="operations-pair">
        <PeriodPanel title="Recent" period={window} />
        <PeriodPanel title="Since the start" period={total} />
      </div>
      <div class="operations-pair">
        <Misses recent={window.verdicts} total={total.verdicts} />
        <Storage operations={operations} />
      </div>
      {tenants && Object.keys(tenants).length > 0 && <Tenants tenants={tenants} />}
    </>
  );
}

function PeriodPanel({ title, period }: { title: string; period: Period }) {
  const { prefix, reused, recomputed, fresh } = period.tokens;
  const all = prefix + reused + recomputed + fresh;
  const counts = { prefix_tokens: prefix, reused_tokens: reused, recomputed_tokens: recomputed, fresh_tokens: fresh };
  return (
    <Panel title={title}>
      <div class="stack">
        <dl class="stats">
          <Stat name="Requests" value={count(requestsOf(period))} hint={byStatus(period)} />
          <Stat name="Not answered" value={count(requestsOf(period) - (period.requests["ok"] ?? 0))} hint={byStatus(period)} />
          <Stat name="First token, p50" value={seconds(period.ttft_p50_s)} />
          <Stat name="First token, p95" value={seconds(period.ttft_p95_s)} />
          <Stat name="From chunks" value={percent(reused, all)} hint="Prompt tokens whose stored KV was used as it is" />
          <Stat name="From prefixes" value={percent(prefix, all)} hint="Prompt tokens of beginnings whose KV was at hand" />
          <Stat name="Saved (estimate)" value={seconds(period.saved_s)} hint="Against computing the reused tokens" />
        </dl>
        <StateBar counts={counts} />
      </div>
    </Panel>
  );
}

const requestsOf = (period: Period) => Object.values(period.requests).reduce((sum, times) => sum + times, 0);
const byStatus = (period: Period) => Object.entries(period.requests).map(([status, times]) => `${status}: ${times}`).join(", ");

function Misses({ recent, total }: { recent: Record<string, number>; total: Record<string, number> }) {
  const all = Object.values(total).reduce((sum, times) => sum + times, 0);
  const outcomes = Object.keys(total).sort((one, other) => total[other]! - total[one]!);
  return (
    <Panel title="What became of chunks">
      {outcomes.length === 0 ? (
        <p class="body muted">No chunk has been asked for yet.</p>
      ) : (
        <table>
          <thead>
            <tr>
              <th scope="col">Outcome</th>
              <th scope="col" class="number">Recent</th>
              <th scope="col" class="number">Since the start</th>
              <th scope="col" class="number">Share</th>
            </tr>
          </thead>
          <tbody>
            {outcomes.map((outcome) => (
              <tr key={outcome}>
                <td>
                  <a href={hrefOf("requests", "", { verdict: outcome })}>{outcomeLabel(outcome)}</a>
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

function Storage({ operations }: { operations: Operations }) {
  const { running, waiting, tiers, evictions, damaged_files } = operations;
  return (
    <Panel title="Load and storage">
      <div class="stack">
        <dl class="stats">
          <Stat name="Running" value={count(running)} />
          <Stat name="Waiting" value={count(waiting)} />
          <Stat name="Evicted chunks" value={count(evictions)} />
          <Stat name="Damaged files" value={count(damaged_files)} />
        </dl>
        <ul class="stack">
          {tiers.map((tier) => (
            <TierRow key={tier.tier} {...tier} />
          ))}
        </ul>
      </div>
    </Panel>
  );
}

function TierRow({ tier, bytes: used, budget_bytes: budget }: Tier) {
  return (
    <li>
      <div class="row">
        <b class="grow">{tier}</b>
        <span>
          {bytes(used)} {budget ? `of ${bytes(budget)} (${percent(used, budget)})` : "without a limit"}
        </span>
      </div>
      {budget ? <meter aria-label={`${tier}, used share`} min={0} max={budget} high={budget * 0.9} value={used} /> : null}
    </li>
  );
}

function Tenants({ tenants }: { tenants: Record<string, Period> }) {
  return (
    <Panel title="Tenants, recently">
      <div class="scroll-x" tabIndex={0} role="region" aria-label="Figures by tenant">
        <table>
          <thead>
            <tr>
              <th scope="col">Tenant</th>
              {["Requests", "p50", "p95", "From chunks", "From prefixes", "Saved"].map((name) => (
                <th scope="col" class="number" key={name}>
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {Object.entries(tenants).map(([tenant, period]) => (
              <TenantRow key={tenant} tenant={tenant} period={period} />
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function TenantRow({ tenant, period }: { tenant: string; period: Period }) {
  const { prefix, reused, recomputed, fresh } = period.tokens;
  const all = prefix + reused + recomputed + fresh;
  return (
    <tr>
      <th scope="row">{tenant || "without a key"}</th>
      <td class="number">{count(requestsOf(period))}</td>
      <td class="number">{seconds(period.ttft_p50_s)}</td>
      <td class="number">{seconds(period.ttft_p95_s)}</td>
      <td class="number">{percent(reused, all)}</td>
      <td class="number">{percent(prefix, all)}</td>
      <td class="number">{seconds(period.saved_s)}</td>
    </tr>
  );
}
