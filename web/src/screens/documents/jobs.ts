// Jobs of ingestion: watched by their events until they end, whichever screen is shown.
import { signal } from "@preact/signals";

import { ask, askStream, isAbort, wordsOf } from "../../api/client";
import type { DocumentRow, Job, List, StartedDocument } from "../../api/types";
import { settings } from "../../server";

export interface Watched {
  job: Job;
  name: string;
  /** What went wrong beside the job itself. */
  error?: string;
}

export const jobs = signal<readonly Watched[]>([]);
/** Rises whenever the documents of the server may have changed. */
export const changes = signal(0);

const ENDED = ["done", "failed", "cancelled", "interrupted"];
const MOST_PAGES = 20;

export function hasEnded(job: Job): boolean {
  return ENDED.includes(job.state);
}

export function isResumable(job: Job): boolean {
  return hasEnded(job) && job.state !== "done";
}

export function changed(): void {
  changes.value += 1;
}

/** Watch what the server was doing before this page was opened. */
export async function watchOpenJobs(): Promise<void> {
  try {
    const [found, documents] = [await all<Job>("/v1/jobs"), await all<DocumentRow>("/v1/documents")];
    const names = new Map(documents.map((one) => [one.id, one.name]));
    // A document's last job counts.
    const last = new Map(found.map((one) => [one.document_id, one]));
    for (const job of last.values()) {
      const name = names.get(job.document_id);
      if (name !== undefined && job.state !== "done" && !jobs.value.some((one) => one.job.id === job.id)) watch(job, name);
    }
  } catch {
    // The list of documents says that the server cannot be reached.
  }
}

/** Read every page of a list. */
export async function all<T extends { id: string }>(path: string): Promise<T[]> {
  const rows: T[] = [];
  for (let page = 0, after = ""; page < MOST_PAGES; page += 1) {
    const found = await ask<List<T>>(`${path}?limit=100${after && `&after=${encodeURIComponent(after)}`}`);
    rows.push(...found.data);
    if (!found.has_more || !found.last_id) break;
    after = found.last_id;
  }
  return rows;
}

export function watch(job: Job, name: string): void {
  put({ job, name });
  if (!hasEnded(job)) void follow(job, name);
}

async function follow(job: Job, name: string): Promise<void> {
  try {
    for await (const told of askStream<Job>(`/v1/jobs/${encodeURIComponent(job.id)}/events`)) {
      put({ job: told, name });
      if (hasEnded(told)) changed();
    }
  } catch (error) {
    if (!isAbort(error)) put({ job: jobs.value.find((one) => one.job.id === job.id)?.job ?? job, name, error: wordsOf(error) });
  }
}

export async function cancel(watched: Watched): Promise<void> {
  await act(watched, "cancel");
}

export async function resume(watched: Watched): Promise<void> {
  const job = await act(watched, "resume");
  if (job) void follow(job, watched.name);
}

export function dismiss(watched: Watched): void {
  jobs.value = jobs.value.filter((one) => one.job.id !== watched.job.id);
}

/** Upload a file and watch its job; throws ApiError. */
export async function upload(file: File): Promise<Job> {
  const form = new FormData();
  form.append("file", file);
  return begun(await ask<StartedDocument>("/v1/documents", { body: form }));
}

/** Upload a text and watch its job; throws ApiError. */
export async function uploadText(name: string, text: string): Promise<Job> {
  return begun(await ask<StartedDocument>("/v1/documents", { body: { name, text } }));
}

/** Watch the job that an answer of the server names. */
export function begun(made: StartedDocument): Job {
  const now = Date.now() / 1000;
  const job: Job = {
    object: "job",
    id: made.job_id,
    document_id: made.id,
    state: "queued",
    done: 0,
    total: 0,
    error: null,
    created_at: now,
    changed_at: now,
  };
  watch(job, made.name);
  changed();
  return job;
}

/** Say why a file cannot be uploaded; empty if it can. */
export function refusalOf(file: File): string {
  const known = settings.value;
  if (!known) return "";
  const dot = file.name.lastIndexOf(".");
  const type = dot < 0 ? "" : file.name.slice(dot).toLowerCase();
  if (!known.upload_types.includes(type)) return `Files of this type are not read; ${known.upload_types.join(", ")} are.`;
  if (file.size > known.max_upload_bytes) return "This file is larger than the server takes.";
  return file.size === 0 ? "This file is empty." : "";
}

async function act(watched: Watched, what: "cancel" | "resume"): Promise<Job | undefined> {
  try {
    const job = await ask<Job>(`/v1/jobs/${encodeURIComponent(watched.job.id)}/${what}`, { method: "POST" });
    put({ job, name: watched.name });
    return job;
  } catch (error) {
    put({ ...watched, error: wordsOf(error) });
    return undefined;
  }
}

function put(watched: Watched): void {
  const known = jobs.value.some((one) => one.job.id === watched.job.id);
  jobs.value = known
    ? jobs.value.map((one) => (one.job.id === watched.job.id ? watched : one))
    : [watched, ...jobs.value];
}
