// A row for each tenant: what it asked, how much of that was at hand, what it stores and may store.
import { Panel } from "../components/base";
import { bytes, count, percent } from "../format";
import type { TenantRow } from "./types";

export function Tenants({ rows }: { rows: TenantRow[] }) {
  return (
    <Panel title="Tenants" actions={<span class="muted small">since the server’s start</span>}>
      <div class="scroll-x" tabIndex={0} role="region" aria-label="Tenants">
        <table class="tenants">
          <thead>
            <tr>
              <th scope="col">Tenant</th>
              <th scope="col" class="number">Requests</th>
              <th scope="col" class="number">Prompt tokens</th>
              <th scope="col" class="number">Answered tokens</th>
              <th scope="col" class="number">From chunks</th>
              <th scope="col" class="number">From prefixes</th>
              <th scope="col" class="number">KV stored</th>
              <th scope="col">Quota</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <Row key={`${row.tenant}/${row.name}`} row={row} taken={takenBy(row.tenant, rows)} />
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Row({ row, taken }: { row: TenantRow; taken: number }) {
  const { tokens, requests, hit_rates: rates } = row;
  const prompt = tokens ? tokens.header + tokens.prefix + tokens.chunk + tokens.recomputed + tokens.fresh : 0;
  const rate = (share: number | null | undefined) => (share == null ? "–" : percent(share, 1));
  return (
    <tr>
      <th scope="row">{row.name === null ? row.tenant : `${row.tenant} / ${row.name}`}</th>
      <td class="number">{count(Object.values(requests ?? {}).reduce((sum, times) => sum + times, 0))}</td>
      <td class="number">{count(prompt)}</td>
      <td class="number">{count(tokens?.completion ?? 0)}</td>
      <td class="number">{rate(rates?.chunk)}</td>
      <td class="number">{rate(rates?.prefix)}</td>
      <td class="number">{bytes(row.stored_bytes)}</td>
      <td>{quotaInWords(row, taken)}</td>
    </tr>
  );
}

/** Names below a tenant count together. */
function takenBy(tenant: string, rows: TenantRow[]): number {
  return rows.filter((row) => row.tenant === tenant).reduce((sum, row) => sum + row.stored_bytes, 0);
}

function quotaInWords({ name, quota }: TenantRow, taken: number): string {
  if (name !== null) return "as its tenant";
  const { requests_per_minute: requests, tokens_per_minute: tokens, stored_bytes: stored } = quota ?? {};
  const parts = [
    requests && `${count(requests)} requests a minute`,
    tokens && `${count(tokens)} tokens a minute`,
    stored && `${bytes(stored)} of KV, ${percent(taken, stored)} used`,
  ].filter(Boolean);
  return parts.join("; ") || "none";
}
