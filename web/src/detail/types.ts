// What the server, and the file that `report.to_html()` writes, say of one request.
import type { Report as ShortReport, Trace as ShortTrace, Verdict } from "../api/types";

export type { Stage, Verdict } from "../api/types";

export interface Report extends ShortReport {
  sidecar_bytes_loaded?: Record<string, number>;
  selection_bytes?: number;
  not_shared?: string;
  retries?: number;
}

/** Spans count Unicode characters, not UTF-16 units; scores are of the tokens of chunks, in order. */
export interface Trace extends ShortTrace {
  model_layers?: number | null;
}

export interface RetrievedChunk {
  text: string | null;
  score?: number | null;
  document_id?: string | null;
  source?: string | null;
  tier?: string | null;
  verdict?: Verdict | string | null;
  tokens?: number | null;
  prompt_chunk?: number | null;
  /** Whether `text` is only its beginning. */
  isCut?: boolean;
}

export interface Detail {
  report: Report | null;
  answer?: string | null;
  chunks?: RetrievedChunk[] | null;
}
