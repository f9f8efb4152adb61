// What a request's screen asks of the server: store a chunk again, measure a full prefill.
import { ask } from "../api/client";
import { has } from "../server";
import type { Verdict } from "./types";
import type { Actions } from "./verdict";
import { beginning } from "./beginning";

interface Job {
  state: string;
  error?: string | null;
}

const ENDED = new Set(["done", "failed", "cancelled", "interrupted"]);
const POLL_MS = 300;

/** Return the actions for the request at a path. */
export function serverActions(path: string): Actions {
  return {
    async ingest(text) {
      const { job_id } = await ask<{ job_id: string }>("/v1/documents", { body: { name: beginning(text, 60), text } });
      await ended(job_id);
      const { outcome, detail } = await ask<Verdict>("/v1/documents/check", { body: { text } });
      return outcome === "reusable" ? STORED : `It was ingested, and yet: ${detail}`;
    },
    async refresh(documentId) {
      const url = `/v1/documents/${encodeURIComponent(documentId)}/refresh`;
      const { job_id } = await ask<{ job_id: string }>(url, { method: "POST" });
      await ended(job_id);
      return STORED;
    },
    measure: has("/v1/requests/{id_}/measure") ? () => measured(path) : undefined,
  };
}

async function measured(path: string): Promise<number> {
  return (await ask<{ full_prefill_s: number }>(`${path}/measure`, { method: "POST" })).full_prefill_s;
}

const STORED = "Stored: the next prompt that contains it reuses it.";

async function ended(job: string): Promise<void> {
  for (;;) {
    const { state, error } = await ask<Job>(`/v1/jobs/${encodeURIComponent(job)}`);
    if (state === "done") return;
    if (ENDED.has(state)) throw new Error(error || `the job is ${state}`);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}
