// What became of a chunk, and what the screen can do about it.

import type { RetrievedChunk, Verdict } from "./types";

export type Mending = "ingest" | "refresh" | null;

const STORED_AGAIN = new Set(["not_ingested", "other_settings", "evicted", "deleted", "damaged"]);

/** Whether storing it again helps. */
export const isStoredAgain = (outcome: string): boolean => STORED_AGAIN.has(outcome);

export const isReused = (outcome: string): boolean => outcome === "reused" || outcome === "reusable";

/** What the server can do so that the chunk is reused next time. */
export function mendingOf(chunk: RetrievedChunk, verdict: Verdict | null): Mending {
  if (!verdict || !isStoredAgain(verdict.outcome)) return null;
  if (chunk.document_id) return "refresh";
  return chunk.text && !chunk.isCut ? "ingest" : null;
}

/** The verdict of a chunk, also where only its outcome is known. */
export function verdictOf(chunk: RetrievedChunk): Verdict | null {
  const given = chunk.verdict;
  if (!given) return null;
  if (typeof given !== "string") return given;
  return { text: chunk.text ?? "", outcome: given, detail: "", remedy: "", diff: "", chunk_id: null, tokens: chunk.tokens ?? 0 };
}
