// All documents of this tenant, found by a part of their name.
import { useState } from "preact/hooks";

import type { DocumentRow } from "../../api/types";
import { Badge, Busy, Button, Empty, Notice, Panel } from "../../components/base";
import { useResource } from "../../components/resource";
import { bytes, count, moment } from "../../format";
import { hrefOf } from "../../router";
import { all, changes } from "./jobs";

export function DocumentList({ current }: { current: string }) {
  const [part, setPart] = useState("");
  const found = useResource(() => all<DocumentRow>("/v1/documents"), [changes.value]);
  const fitting = (found.data ?? []).filter((one) => one.name.toLowerCase().includes(part.toLowerCase()));
  // What was just added comes first.
  const rows = fitting.sort((one, other) => other.created_at - one.created_at);
  const title = found.data ? `Documents (${found.data.length})` : "Documents";
  return (
    <Panel
      title={title}
      actions={
        <>
          <input
            type="search"
            data-focus
            class="search"
            aria-label="Search documents"
            placeholder="Search"
            value={part}
            onInput={(event) => setPart(event.currentTarget.value)}
          />
          <Button kind="quiet" label="Load again" onClick={found.reload}>
            ↻
          </Button>
        </>
      }
    >
      {found.error && <Notice tone="bad">{found.error}</Notice>}
      {!found.data && found.loading && <Busy />}
      {found.data?.length === 0 && <Empty title="No documents yet">Add some above; they can be asked about when done.</Empty>}
      {rows.length > 0 && <Rows rows={rows} current={current} />}
      {found.data && found.data.length > 0 && !rows.length && <Empty title="No name contains this" />}
    </Panel>
  );
}

function Rows({ rows, current }: { rows: DocumentRow[]; current: string }) {
  return (
    <div class="scroll-x" tabIndex={0} role="region" aria-label="Documents">
      <table class="documents">
        <thead>
          <tr>
            <th>Name</th>
            <th>State</th>
            <th class="number">Chunks</th>
            <th class="number">Size</th>
            <th>Added</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((one) => (
            <tr key={one.id} aria-current={one.id === current ? "true" : undefined}>
              <td class="name">
                <a class="wrap" href={hrefOf("documents", one.id)}>
                  {one.name || "unnamed"}
                </a>
              </td>
              <td>
                <Badge tone={one.ready ? "good" : "warn"}>{one.ready ? "ready" : "not ready"}</Badge>
                {one.pinned && <Badge tone="info">pinned</Badge>}
              </td>
              <td class="number">{count(one.chunks)}</td>
              <td class="number nowrap">{bytes(one.bytes)}</td>
              <td class="nowrap muted">{moment(one.created_at)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
