// What became of a chunk, in words, and what the screen can do about it.

import type { RetrievedChunk, Verdict } from "./types";

export type Mending = "ingest" | "refresh" | null;

const LABELS: Record<string, string> = {
  reused: "Reused",
  reusable: "Would be reused",
  recomputed: "Recomputed whole",
  not_ingested: "Not ingested",
  other_settings: "Stored for other settings",
  other_tenant: "Another tenant's",
  respaced: "Other white space",
  escaped: "Escaped",
  shortened: "Shortened",
  rewritten: "Altered",
  not_in_prompt: "Not in the prompt",
  too_short: "Too short",
  too_long: "Too long",
  overlap: "Overlapped",
  evicted: "Evicted",
  deleted: "Deleted",
  damaged: "Damaged",
  not_loaded: "Not loaded in time",
};

const STORED_AGAIN = new Set(["not_ingested", "other_settings", "evicted", "deleted", "damaged"]);

/** All outcomes that a request can have, for filters. */
export const OUTCOMES = Object.keys(LABELS).filter((outcome) => outcome !== "reusable");

export const outcomeLabel = (outcome: string): string => LABELS[outcome] ?? outcome;

export const isReused = (outcome: string): boolean => outcome === "reused" || outcome === "reusable";

/** What the server can do so that the chunk is reused next time. */
export function mendingOf(chunk: RetrievedChunk, verdict: Verdict | null): Mending {
  if (!verdict || !STORED_AGAIN.has(verdict.outcome)) return null;
  if (chunk.document_id) return "refresh";
  return chunk.text ? "ingest" : null;
}

/** The verdict of a chunk, also where only its outcome is known. */
export function verdictOf(chunk: RetrievedChunk): Verdict | null {
  const given = chunk.verdict;
  if (!given) return null;
  if (typeof given !== "string") return given;
  return { text: chunk.text ?? "", outcome: given, detail: "", remedy: "", diff: "", chunk_id: null, tokens: chunk.tokens ?? 0 };
}
