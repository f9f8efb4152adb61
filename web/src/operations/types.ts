// What /v1/operations says.

export interface Period {
  requests: Record<string, number>;
  ttft_p50_s: number | null;
  ttft_p95_s: number | null;
  tokens: { prefix: number; reused: number; recomputed: number; fresh: number };
  saved_s: number | null;
  verdicts: Record<string, number>;
}

export interface Tier {
  tier: string;
  bytes: number;
  budget_bytes: number | null;
}

export interface Operations {
  started_s: number;
  window_s: number;
  total: Period;
  window: Period;
  /** By tenant; null for those who see one only. */
  tenants: Record<string, Period> | null;
  running: number;
  waiting: number;
  tiers: Tier[];
  evictions: number;
  damaged_files: number;
  kv_bytes_loaded?: Record<string, number>;
}
