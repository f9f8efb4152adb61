// What was asked of this server: a table to filter, and two of its rows side by side.
import { useEffect, useState } from "preact/hooks";

import { ask, queryOf, wordsOf } from "../api/client";
import type { List, RequestSummary } from "../api/types";
import { Badge, Busy, Button, Empty, Notice, Panel } from "../components/base";
import { useResource } from "../components/resource";
import { count, moment, percent, seconds } from "../format";
import { hrefOf, route } from "../router";
import { ReportDifference } from "../requests/difference";
import { loadSettings } from "../server";
import { Filters, filtersOf, type Filtering, queryFor } from "../requests/filters";

const PAGE = 50;

export function RequestsScreen() {
  useEffect(() => void loadSettings(), []);
  const filters = filtersOf(route.value.query);
  const query = queryFor(filters, Date.now() / 1000);
  const first = useResource((signal) => page(query, signal), [JSON.stringify(filters)]);
  const [chosen, choose] = useState<string[]>([]);
  return (
    <div class="page">
      <Filters filters={filters} />
      {chosen.length === 2 && <ReportDifference key={chosen.join()} ids={[chosen[0]!, chosen[1]!]} onClose={() => choose([])} />}
      {first.error && <Notice tone="bad">{first.error}</Notice>}
      {!first.data && !first.error && <Busy>Loading the requests</Busy>}
      {first.data && (
        <Rows
          key={JSON.stringify(filters)}
          first={first.data}
          filters={filters}
          query={query}
          chosen={chosen}
          choose={choose}
          reload={first.reload}
        />
      )}
    </div>
  );
}

function page(query: Record<string, string | number | undefined>, signal?: AbortSignal) {
  return ask<List<RequestSummary>>(`/v1/requests${queryOf({ ...query, limit: PAGE })}`, { signal });
}

interface RowsProps {
  first: List<RequestSummary>;
  filters: Filtering;
  query: Record<string, string | number | undefined>;
  chosen: string[];
  choose: (ids: string[]) => void;
  reload: () => void;
}

function Rows({ first, filters, query, chosen, choose, reload }: RowsProps) {
  const [older, setOlder] = useState<RequestSummary[]>([]);
  const [more, setMore] = useState(first.has_more);
  const [error, setError] = useState("");
  const rows = [...first.data, ...older].filter((row) => !filters.model || row.model === filters.model);
  const load = async () => {
    try {
      const last = older.at(-1) ?? first.data.at(-1);
      const next = await page({ ...query, before: last?.id });
      setOlder([...older, ...next.data]);
      setMore(next.has_more);
    } catch (failure) {
      setError(wordsOf(failure));
    }
  };
  const toggle = (id: string) =>
    choose(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-2));
  const words = chosen.length === 1 ? "Choose a second one to compare." : "Choose two to compare them.";
  return (
    <Panel
      title="Requests"
      actions={
        <>
          {chosen.length < 2 && rows.length > 1 && <span class="muted small">{words}</span>}
          <Button onClick={reload}>Reload</Button>
        </>
      }
    >
      {rows.length === 0 ? (
        <Empty title="No request fits">
          <p>
            Ask something in the <a href={hrefOf("chat")}>chat</a>, or loosen the filters.
          </p>
        </Empty>
      ) : (
        <Table rows={rows} chosen={chosen} toggle={toggle} />
      )}
      {error && <Notice tone="bad">{error}</Notice>}
      {more && (
        <div class="body">
          <Button onClick={load}>Older</Button>
        </div>
      )}
    </Panel>
  );
}

interface TableProps {
  rows: RequestSummary[];
  chosen: string[];
  toggle: (id: string) => void;
}

function Table({ rows, chosen, toggle }: TableProps) {
  return (
    <div class="scroll-x" tabIndex={0} role="region" aria-label="Requests, newest first">
      <table class="requests">
        <thead>
          <tr>
            <th scope="col">
              <span class="unseen">Compare</span>
            </th>
            <th scope="col">Question</th>
            <th scope="col">Status</th>
            <th scope="col">Selector</th>
            <th scope="col" class="number">Prompt</th>
            <th scope="col" class="number">From prefix</th>
            <th scope="col" class="number">From chunks</th>
            <th scope="col" class="number">First token</th>
            <th scope="col" class="number">Saved</th>
            <th scope="col" class="number">Not reused</th>
            <th scope="col">Time</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <Row key={row.id} row={row} isChosen={chosen.includes(row.id)} toggle={toggle} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Row({ row, isChosen, toggle }: { row: RequestSummary; isChosen: boolean; toggle: (id: string) => void }) {
  const question = row.question ?? row.id;
  const lost = Object.entries(row.verdicts ?? {}).filter(([outcome]) => outcome !== "reused");
  const missed = lost.reduce((sum, [, times]) => sum + times, 0);
  return (
    <tr class={isChosen ? "chosen" : undefined}>
      <td>
        <input type="checkbox" checked={isChosen} aria-label={`Compare “${question}”`} onChange={() => toggle(row.id)} />
      </td>
      <td class="asked">
        <a href={hrefOf("requests", row.id)}>{question}</a>
      </td>
      <td>
        <Badge tone={row.status === "ok" ? "good" : "warn"}>{row.status}</Badge>
      </td>
      <td>{row.selector ? `${row.selector} ${+row.recompute_ratio.toFixed(3)}` : "–"}</td>
      <td class="number">{count(row.prompt_tokens)}</td>
      <td class="number">{percent(row.prefix_tokens, row.prompt_tokens)}</td>
      <td class="number">{percent(row.reused_tokens, row.prompt_tokens)}</td>
      <td class="number">{seconds(row.ttft_s)}</td>
      <td class="number">{seconds(row.saved_s)}</td>
      <td class="number" title={lost.map(([outcome, times]) => `${outcome}: ${times}`).join(", ")}>
        {missed || "–"}
      </td>
      <td class="when">{moment(row.created_s)}</td>
    </tr>
  );
}
