// What the selector and the recomputation did, as steps to look at one after the other.

import { type Painting, rankedTokens } from "./paint";
import type { PromptModel } from "./prompt-model";

export interface Step {
  caption: string;
  painting: Painting;
}

/** Paints of the replay: 1 selected, 2 to 9 recomputed as far as so many eighths of the layers. */
const SELECTED = 1;
const EIGHTHS = 8;

/** The steps of a replay: tokens are picked layer by layer, then recomputed layer by layer. */
export class Replay {
  readonly length: number;
  private readonly recomputed: Int32Array;

  constructor(private readonly model: PromptModel) {
    this.recomputed = Int32Array.from(model.states.keys()).filter((token) => model.states[token] === 2);
    this.length = model.layers.length + 2 + (this.recomputed.length ? Math.max(model.modelLayers, 1) : 0);
  }

  step(number: number): Step {
    const layers = this.model.layers;
    if (number === 0) return this.painted("Nothing is chosen yet: all chunks have their stored KV", [], 0);
    if (number <= layers.length) {
      const chosen = rankedTokens(this.model.scores(number - 1)).subarray(0, this.recomputed.length);
      return this.painted(`Selection, layer ${layers[number - 1]}: the tokens with the highest scores`, chosen, SELECTED);
    }
    if (number === layers.length + 1) {
      const caption = `Chosen for recomputation: ${this.recomputed.length.toLocaleString("en")} tokens`;
      return this.painted(caption, this.recomputed, SELECTED);
    }
    const done = number - layers.length - 1;
    const all = this.length - layers.length - 2;
    const caption = `Recomputation: ${done} of ${all} layers`;
    return this.painted(caption, this.recomputed, SELECTED + Math.max(1, Math.round((EIGHTHS * done) / all)));
  }

  private painted(caption: string, tokens: Iterable<number>, value: number): Step {
    const paint = new Uint8Array(this.model.tokens);
    for (const token of tokens) paint[token] = value;
    return { caption, painting: { mode: "replay", paint } };
  }
}
