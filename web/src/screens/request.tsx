// One request of this server: what was reused, why, and what it cost.
import { useEffect } from "preact/hooks";

import { ApiError, ask } from "../api/client";
import type { RequestSummary } from "../api/types";
import { Badge, Busy, Notice } from "../components/base";
import { useResource } from "../components/resource";
import { DetailView } from "../detail/detail-view";
import { serverActions } from "../detail/server-actions";
import type { Detail, Trace } from "../detail/types";
import { moment } from "../format";
import { hrefOf } from "../router";
import { loadSettings, settings } from "../server";

type Kept = Detail & RequestSummary & { detail_available: boolean };

interface Found {
  trace: Trace | null;
  /** Why there is none. */
  why: string;
}

export function RequestDetailScreen({ id }: { id: string }) {
  const path = `/v1/requests/${encodeURIComponent(id)}`;
  const kept = useResource((signal) => ask<Kept>(path, { signal }), [id]);
  const found = useResource((signal) => traceOf(path, signal), [id]);
  useEffect(() => void loadSettings(), []);
  return (
    <div class="page">
      <nav aria-label="Above">
        <a href={hrefOf("requests")}>← All requests</a>
      </nav>
      {kept.error && <Notice tone="bad">{kept.error}</Notice>}
      {!kept.data && !kept.error && <Busy>Loading the request</Busy>}
      {kept.data && <Head kept={kept.data} />}
      {kept.data && !found.loading && (
        <DetailView
          key={id}
          detail={kept.data}
          trace={found.data?.trace ?? null}
          noTrace={found.data?.why ?? found.error}
          actions={settings.value ? serverActions(path) : undefined}
        />
      )}
    </div>
  );
}

async function traceOf(path: string, signal: AbortSignal): Promise<Found> {
  try {
    return { trace: await ask<Trace>(`${path}/trace`, { signal }), why: "" };
  } catch (error) {
    if (error instanceof ApiError && error.status < 500) return { trace: null, why: error.message };
    throw error;
  }
}

function Head({ kept }: { kept: Kept }) {
  const facts = [moment(kept.created_s), kept.model, kept.selector, kept.id].filter(Boolean);
  return (
    <div class="request-head">
      <p class="asked">{kept.question ?? "A request whose texts were not kept"}</p>
      <p class="muted small wrap">
        <Badge tone={kept.status === "ok" ? "good" : "warn"}>{kept.status}</Badge> {facts.join(" · ")}
      </p>
    </div>
  );
}
