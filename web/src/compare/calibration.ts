// A set of questions answered in several ways: what each way does to the answers, and which one to take.
import { ApiError, ask, isAbort, wordsOf } from "../api/client";
import { percent, plural, seconds } from "../format";
import { type Comparison, nameOf, type Wanted } from "./types";

export interface Figures {
  way: Wanted;
  /** Of each question. */
  agreements: number[];
  kls: number[];
  ttfts_s: number[];
}

export interface Tally {
  /** Questions that are done, those that failed included. */
  done: number;
  ways: Figures[];
  full_s: number[];
  failed: { question: string; why: string }[];
}

export interface QuestionSet {
  questions: string[];
  ways: Wanted[];
  k: number;
  max_tokens: number;
}

/** What /v1/compare takes at once. */
const MOST_COLUMNS = 4;

/** Ask one question after the other, and tell of each; throws what would end the others too. */
export async function calibrate(set: QuestionSet, signal: AbortSignal, onTally: (tally: Tally) => void): Promise<void> {
  const ways = set.ways.filter((way) => way.recompute_ratio !== 1);
  if (!ways.length) throw new Error("Choose a way besides full prefill: each is compared with that.");
  const tally: Tally = {
    done: 0,
    ways: ways.map((way) => ({ way, agreements: [], kls: [], ttfts_s: [] })),
    full_s: [],
    failed: [],
  };
  for (const question of set.questions) {
    try {
      await askOne(question, set, ways, tally, signal);
    } catch (error) {
      // A question that the server does not take says nothing of the others.
      if (isAbort(error) || !(error instanceof ApiError) || error.status !== 400) throw error;
      tally.failed.push({ question, why: wordsOf(error) });
    }
    tally.done += 1;
    onTally({ ...tally });
  }
}

async function askOne(question: string, set: QuestionSet, ways: Wanted[], tally: Tally, signal: AbortSignal): Promise<void> {
  const messages = [{ role: "user", content: question }];
  const parts: Comparison[] = [];
  for (let first = 0; first < ways.length; first += MOST_COLUMNS) {
    const columns = ways.slice(first, first + MOST_COLUMNS);
    const body = { messages, columns, max_tokens: set.max_tokens, ...(set.k > 0 && { retrieve: { k: set.k } }) };
    parts.push(await ask<Comparison>("/v1/compare", { body, signal }));
  }
  // All of a question or nothing: rows are of the same questions then.
  tally.full_s.push(parts[0]!.reference!.ttft_s);
  parts
    .flatMap((part) => part.columns)
    .forEach(({ agreement, kl, ttft_s }, number) => {
      const figures = tally.ways[number]!;
      figures.agreements.push(agreement ?? 0);
      figures.kls.push(kl ?? 0);
      figures.ttfts_s.push(ttft_s);
    });
}

export const mean = (values: readonly number[]): number => values.reduce((sum, value) => sum + value, 0) / values.length;

export function median(values: readonly number[]): number {
  const ordered = [...values].sort((one, other) => one - other);
  const middle = ordered.length >> 1;
  return ordered.length % 2 ? ordered[middle]! : (ordered[middle - 1]! + ordered[middle]!) / 2;
}

export interface Advice {
  words: string;
  /** The way to take; null where full prefill is left. */
  way: Wanted | null;
}

const FEW_QUESTIONS = 10;

/** Say which way to take: the smallest ratio whose answers agree well enough with full prefill's. */
export function advice({ ways, full_s }: Tally, wanted: number): Advice | null {
  const judged = ways.filter((one) => one.agreements.length);
  if (!judged.length) return null;
  const ratio = ({ way }: Figures) => way.recompute_ratio ?? 1;
  const better = (one: Figures, other: Figures) => mean(other.agreements) - mean(one.agreements);
  const good = judged.filter((one) => mean(one.agreements) >= wanted);
  const best = good.sort((one, other) => ratio(one) - ratio(other) || better(one, other))[0];
  const few = full_s.length < FEW_QUESTIONS ? ` ${plural(full_s.length, "question")} are few: ask twenty or more before you rely on it.` : "";
  if (!best) {
    const nearest = [...judged].sort(better)[0]!;
    const agreed = percent(mean(nearest.agreements), 1);
    return {
      way: null,
      words: `No way reaches ${percent(wanted, 1)}: the nearest is ${nameOf(nearest.way)} with ${agreed}. Try larger ratios, or stay with full prefill (ratio 1).${few}`,
    };
  }
  const times = median(full_s) / Math.max(median(best.ttfts_s), 1e-9);
  return {
    way: best.way,
    words: `Take ${nameOf(best.way)}: ${percent(mean(best.agreements), 1)} of the tokens are those of full prefill (you want ${percent(wanted, 1)}), and the first one comes after ${seconds(median(best.ttfts_s))} instead of ${seconds(median(full_s))}, ${times.toFixed(1)} times as soon.${few}`,
  };
}
