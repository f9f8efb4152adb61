// What /v1/operations says.

export interface Period {
  requests: Record<string, number>;
  ttft_s: { p50: number | null; p95: number | null };
  tokens: { header: number; prefix: number; chunk: number; recomputed: number; fresh: number };
  /** Shares of prompt tokens, null before there were any. */
  hit_rates: { prefix: number | null; chunk: number | null } | null;
  saved: { saved_s: number | null; requests_unknown: number };
  verdicts: Record<string, number>;
}

export interface Tier {
  chunks: number;
  bytes: number;
  budget_bytes?: number | null;
}

export interface Operations {
  now_s: number;
  since_s: number;
  /** Of all tenants together, so only for those who see all. */
  running?: number;
  waiting?: number;
  since_start: Period;
  recent: Period;
  store: { tiers: Record<string, Tier>; evictions: Record<string, number>; damaged: number };
}
