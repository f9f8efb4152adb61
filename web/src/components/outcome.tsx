// What became of a chunk, in a word with a tone.
import { Badge, type Tone } from "./base";

const WORDS: Record<string, [string, Tone]> = {
  reused: ["reused", "good"],
  reusable: ["reusable", "good"],
  recomputed: ["recomputed", "info"],
  not_ingested: ["not ingested", "warn"],
  other_settings: ["other settings", "warn"],
  other_tenant: ["other tenant", "warn"],
  respaced: ["re-spaced", "warn"],
  escaped: ["escaped", "warn"],
  shortened: ["shortened", "warn"],
  rewritten: ["rewritten", "warn"],
  not_in_prompt: ["not in the prompt", "warn"],
  too_short: ["too short", "plain"],
  too_long: ["too long", "warn"],
  overlap: ["overlap", "plain"],
  evicted: ["evicted", "warn"],
  deleted: ["deleted", "warn"],
  damaged: ["damaged", "bad"],
  not_loaded: ["not loaded", "warn"],
};

/** All outcomes that a chunk of a request can have, for filters. */
export const OUTCOMES = Object.keys(WORDS).filter((outcome) => outcome !== "reusable");

export const outcomeWords = (outcome: string): string => WORDS[outcome]?.[0] ?? outcome.replaceAll("_", " ");

export function OutcomeBadge({ outcome }: { outcome: string }) {
  return <Badge tone={WORDS[outcome]?.[1] ?? "plain"}>{outcomeWords(outcome)}</Badge>;
}
