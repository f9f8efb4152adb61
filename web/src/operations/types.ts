// What /v1/operations says.

export interface Period {
  requests: Record<string, number>;
  ttft_s: { p50: number | null; p95: number | null };
  tokens: { header: number; prefix: number; chunk: number; recomputed: number; fresh: number; completion?: number };
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

/** What one tenant asked since the start, and what it stores. */
export interface TenantRow extends Partial<Nullable<Pick<Period, "requests" | "tokens" | "hit_rates" | "saved">>> {
  tenant: string;
  /** The further name that its client gave; null for what has none. */
  name: string | null;
  stored_bytes: number;
  /** Of the whole tenant; each null where nothing bounds it. */
  quota: { requests_per_minute: number | null; tokens_per_minute: number | null; stored_bytes: number | null } | null;
}

type Nullable<T> = { [name in keyof T]: T[name] | null };

export interface Operations {
  now_s: number;
  since_s: number;
  /** Of all tenants together, so only for those who see all. */
  running?: number;
  waiting?: number;
  since_start: Period;
  recent: Period;
  /** Only one's own where there are keys; not there from older servers. */
  tenants?: TenantRow[];
  store: { tiers: Record<string, Tier>; evictions: Record<string, number>; damaged: number };
}
