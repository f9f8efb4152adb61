import type { components } from "./schema";

// What the server sends and its schema does not say yet. Everything optional may be missing from an older server.

export interface Verdict {
  text: string;
  outcome: string;
  detail: string;
  remedy: string;
  diff: string;
  chunk_id: string | null;
  tokens: number;
  /** What the retriever gave it. */
  score?: number | null;
}

export interface Stage {
  stage: string;
  start_s: number;
  end_s: number;
}

/** FusionReport.to_dict(). */
export interface Report {
  prompt_tokens: number;
  prefix_tokens: number;
  prefix_cache_tokens: number;
  reused_tokens: number;
  recomputed_tokens: number;
  fresh_tokens: number;
  completion_tokens: number;
  cached_tokens: number;
  computed_tokens: number;
  chunks_found: number;
  chunks_missed: number;
  unmatched: string[];
  verdicts: Verdict[];
  recompute_ratio: number;
  selector: string;
  bytes_loaded: Record<string, number>;
  own_kv_bytes: number;
  shared_kv_bytes: number;
  seconds: Record<string, number>;
  ttft_s: number;
  warnings: string[];
  timeline?: Stage[];
}

export interface Retrieved {
  document_id: string;
  name: string;
  chunk: number;
  score: number;
}

export interface UsedChunk {
  text: string;
  score: number | null;
  document_id: string | null;
  source: string | null;
  tier: string | null;
  verdict: string | null;
  tokens: number;
}

export interface List<T> {
  object: "list";
  data: T[];
  has_more: boolean;
  last_id?: string | null;
}

export interface Model {
  id: string;
  max_model_len: number;
  created: number;
}

/** A row of /v1/requests. */
export interface RequestSummary {
  id: string;
  created_s: number;
  endpoint: string;
  model: string;
  status: "ok" | "cancelled" | "refused" | "failed";
  selector: string;
  recompute_ratio: number;
  prompt_tokens: number;
  completion_tokens: number;
  prefix_tokens: number;
  reused_tokens: number;
  recomputed_tokens: number;
  fresh_tokens: number;
  ttft_s: number | null;
  latency_s: number | null;
  saved_s: number | null;
  verdicts: Record<string, number>;
  question: string | null;
}

export interface RequestDetail extends RequestSummary {
  report: Report | null;
  answer: string | null;
  messages: { role: string; content: string }[] | null;
  chunks: UsedChunk[];
  detail_available: boolean;
}

/** PromptTrace.to_dict(). */
export interface Trace {
  text: string;
  tokens: [number, number][];
  states: number[];
  chunk: number[];
  selection: { layers: number[]; scores: number[][] | null; total: (number | null)[] | null } | null;
}

export type WebSettings = components["schemas"]["WebSettings"];

export type Job = components["schemas"]["JobObject"];
export type JobState = Job["state"];
export type DocumentRow = components["schemas"]["DocumentObject"];
export type StartedDocument = components["schemas"]["StartedDocument"];
export type ChunkRow = components["schemas"]["StoredChunk"];
export type DocumentDetail = components["schemas"]["DocumentDetail"];
export type Estimate = components["schemas"]["Estimate"];
