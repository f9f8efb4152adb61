// The tokens of a prompt as typed arrays, and the segments in which they are shown.

import type { Trace } from "./types";

/** Neighbouring tokens of one chunk (or of none, -1), few enough to be laid out at once. */
export interface Segment {
  first: number;
  end: number;
  chunk: number;
  /** Whether it is the first one of its chunk or of the text between chunks. */
  begins: boolean;
}

const WANTED_TOKENS = 300;
const MOST_TOKENS = 600;

export class PromptModel {
  readonly tokens: number;
  readonly states: Uint8Array;
  readonly chunk: Int32Array;
  readonly segments: Segment[];
  /** The model's layers, as far as they are known. */
  readonly modelLayers: number;
  private readonly begins: Int32Array;
  private readonly byLayer = new Map<number, Float32Array>();
  private readonly inChunks: Int32Array;

  constructor(readonly trace: Trace) {
    this.tokens = trace.states.length;
    this.states = Uint8Array.from(trace.states);
    this.chunk = Int32Array.from(trace.chunk);
    this.begins = tokenBegins(trace);
    this.inChunks = Int32Array.from(this.chunk.keys()).filter((token) => this.chunk[token]! >= 0);
    this.segments = this.split();
    const layers = trace.selection?.layers ?? [];
    this.modelLayers = trace.model_layers ?? (layers.length ? Math.max(...layers) + 1 : 0);
  }

  /** Layers whose scores are known. */
  get layers(): number[] {
    return this.trace.selection?.scores ? this.trace.selection.layers : [];
  }

  get hasScores(): boolean {
    return this.layers.length > 0 || this.trace.selection?.total != null;
  }

  text(first: number, end: number): string {
    return this.trace.text.slice(this.begins[first], this.begins[end]);
  }

  /** Tokens of each state, between two tokens. */
  counts(first = 0, end = this.tokens): [number, number, number, number] {
    const counts: [number, number, number, number] = [0, 0, 0, 0];
    for (let token = first; token < end; token++) counts[this.states[token]! as 0 | 1 | 2 | 3]++;
    return counts;
  }

  /** Scores of one entry of `layers`, or with -1 of all together: a number per token, NaN outside chunks. */
  scores(entry: number): Float32Array {
    let scores = this.byLayer.get(entry);
    if (!scores) this.byLayer.set(entry, (scores = this.readScores(entry)));
    return scores;
  }

  private readScores(entry: number): Float32Array {
    const scores = new Float32Array(this.tokens).fill(NaN);
    const total = this.trace.selection?.total;
    if (entry < 0 && total) {
      total.forEach((score, token) => (scores[token] = score ?? NaN));
    } else if (entry < 0) {
      // Without a sum of the selector's own: the mean over its layers.
      for (let layer = 0; layer < this.layers.length; layer++) {
        const of = this.scores(layer);
        for (const token of this.inChunks) scores[token] = (scores[token] || 0) + of[token]! / this.layers.length;
      }
    } else {
      const given = this.trace.selection?.scores?.[entry] ?? [];
      this.inChunks.forEach((token, number) => (scores[token] = given[number] ?? NaN));
    }
    return scores;
  }

  private split(): Segment[] {
    const segments: Segment[] = [];
    for (let first = 0; first < this.tokens; ) {
      const chunk = this.chunk[first]!;
      let end = first + 1;
      while (end < this.tokens && this.chunk[end] === chunk && !this.isFull(first, end)) end++;
      const before = segments.at(-1);
      segments.push({ first, end, chunk, begins: before?.chunk !== chunk });
      first = end;
    }
    return segments;
  }

  /** A long segment ends where a line does, so that it breaks nothing. */
  private isFull(first: number, end: number): boolean {
    if (end - first < WANTED_TOKENS) return false;
    return end - first >= MOST_TOKENS || this.text(end - 1, end).endsWith("\n");
  }
}

/** Where each token's text begins, in UTF-16 units; what stands between two tokens belongs to the first. */
function tokenBegins({ text, tokens }: Trace): Int32Array {
  const unit = unitOf(text);
  const begins = new Int32Array(tokens.length + 1);
  for (let token = 1; token < tokens.length; token++) {
    begins[token] = Math.max(begins[token - 1]!, unit(tokens[token]![0]));
  }
  begins[tokens.length] = text.length;
  return begins;
}

/** Characters beyond the basic plane are two units of a JavaScript string. */
function unitOf(text: string): (character: number) => number {
  if (!/[\ud800-\udbff]/.test(text)) return (character) => character;
  const units: number[] = [];
  let unit = 0;
  for (const character of text) {
    units.push(unit);
    unit += character.length;
  }
  return (character) => units[character] ?? text.length;
}
