// What became of a prompt's tokens: four states, each with a colour, a pattern and a word.
import { count, percent } from "../format";

export interface StateCounts {
  prefix_tokens: number;
  reused_tokens: number;
  recomputed_tokens: number;
  fresh_tokens: number;
}

export const STATES = ["prefix", "reused", "recomputed", "fresh"] as const;
export type TokenState = (typeof STATES)[number];

export const STATE_WORDS: Record<TokenState, string> = {
  prefix: "from the prefix cache",
  reused: "reused from stored KV",
  recomputed: "recomputed for quality",
  fresh: "computed, nothing was stored",
};

/** A bar of the shares; the legend below it says the same in words. */
export function StateBar({ counts, legend = true }: { counts: StateCounts; legend?: boolean }) {
  const total = STATES.reduce((sum, state) => sum + counts[`${state}_tokens`], 0);
  const words = STATES.map((state) => `${state} ${percent(counts[`${state}_tokens`], total)}`).join(", ");
  return (
    <div class="states">
      <div class="state-bar" role="img" aria-label={`Tokens: ${words}`}>
        {STATES.map((state) => (
          <i key={state} class={`state-${state}`} style={{ flexGrow: counts[`${state}_tokens`] }} />
        ))}
      </div>
      {legend && (
        <ul class="legend">
          {STATES.map((state) => (
            <li key={state} title={STATE_WORDS[state]}>
              <span class={`swatch state-${state}`} aria-hidden="true" /> {state}{" "}
              <b>{percent(counts[`${state}_tokens`], total)}</b>{" "}
              <small>{count(counts[`${state}_tokens`])}</small>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}
