// In which paint every token is shown: by state, by score, or at a step of the replay.

import type { PromptModel } from "./prompt-model";

/** `paint[token]` chooses among the paints of `mode` in detail.css. */
export interface Painting {
  mode: "state" | "score" | "replay";
  paint: Uint8Array;
}

/** Shares of the chunks' tokens above which a paint begins, the strongest first: paints 8 to 1. */
export const SCORE_SHARES = [0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1];

export function byState(model: PromptModel): Painting {
  return { mode: "state", paint: model.states };
}

/** Scores are skewed beyond use as they are: a token's paint is its rank's. */
export function byScore(model: PromptModel, entry: number): Painting {
  const scores = model.scores(entry);
  const paint = new Uint8Array(model.tokens);
  const ranked = rankedTokens(scores);
  let level = 0;
  ranked.forEach((token, rank) => {
    while (rank >= SCORE_SHARES[level]! * ranked.length && level < SCORE_SHARES.length - 1) level++;
    paint[token] = SCORE_SHARES.length - level;
  });
  return { mode: "score", paint };
}

/** Tokens with a score, the highest first. */
export function rankedTokens(scores: Float32Array): Int32Array {
  const known = Int32Array.from(scores.keys()).filter((token) => !Number.isNaN(scores[token]));
  return known.sort((one, other) => scores[other]! - scores[one]! || one - other);
}
