// What /v1/compare says of each way of answering.
import type { Report } from "../detail/types";

export interface Column {
  selector: string;
  recompute_ratio: number;
  answer: string;
  ttft_s: number;
  report: Report;
  /** Divergence of its next-token distributions from full prefill's. */
  kl: number | null;
  /** Share of tokens that full prefill would have chosen too. */
  agreement: number | null;
  first_difference: number | null;
}

export interface Wanted {
  selector?: string;
  recompute_ratio?: number;
}

export interface Comparison {
  columns: Column[];
  reference?: { answer: string; ttft_s: number } | null;
}

/** Return how a column is called. */
export function nameOf({ selector, recompute_ratio: ratio }: Wanted): string {
  if (ratio === 1) return "full prefill";
  const share = ratio === undefined ? "" : ` ${+ratio.toFixed(3)}`;
  return `${selector || "default"}${share}`;
}
