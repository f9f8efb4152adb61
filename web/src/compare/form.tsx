// What is compared: a prompt, and two to four ways of answering it.
import type { Signal } from "@preact/signals";
import { useState } from "preact/hooks";

import { Button, Field, Panel } from "../components/base";
import { keepFocus } from "../components/focus";
import { settings } from "../server";
import { stored } from "../stored";
import type { Wanted } from "./types";

export interface Asked {
  prompt: string;
  k: number;
  max_tokens: number;
  columns: Wanted[];
}

const FIRST: Wanted[] = [
  { recompute_ratio: 1 },
  { selector: "sink_attention", recompute_ratio: 0.15 },
  { selector: "full_reuse", recompute_ratio: 0 },
];
const columns = stored<Wanted[]>("compare.columns", FIRST);

interface Props {
  busy: boolean;
  onRun: (asked: Asked) => void;
  onStop: () => void;
}

export function CompareForm({ busy, onRun, onStop }: Props) {
  const [prompt, setPrompt] = useState("");
  const [k, setK] = useState(4);
  const [answer, setAnswer] = useState(32);
  const submit = (event: Event) => {
    event.preventDefault();
    if (!busy && prompt.trim()) onRun({ prompt: prompt.trim(), k, max_tokens: answer, columns: columns.value });
  };
  return (
    <Panel title="One prompt, several ways">
      <form class="stack" onSubmit={submit}>
        <Field label="Question or prompt">
          <textarea rows={3} value={prompt} required data-focus onInput={(event) => setPrompt(event.currentTarget.value)} />
        </Field>
        <div class="row">
          <Field label="Chunks to retrieve" hint="0: the prompt as it is">
            <NumberInput value={k} min={0} max={50} onSet={setK} />
          </Field>
          <Field label="Answer, at most tokens" hint="The same for all">
            <NumberInput value={answer} min={1} max={128} onSet={setAnswer} />
          </Field>
        </div>
        <Ways ways={columns} most={4} />
        <div class="row">
          <Button type="submit" kind="primary" busy={busy} disabled={!prompt.trim()}>
            {busy ? "Comparing…" : "Compare"}
          </Button>
          {busy && (
            <Button data-stop onClick={() => (keepFocus("[type=submit]"), onStop())}>
              Stop
            </Button>
          )}
          <span class="muted small">They are answered in turns, each once to warm up.</span>
        </div>
      </form>
    </Panel>
  );
}

/** The ways that a signal holds, two at least. */
export function Ways({ ways, most }: { ways: Signal<Wanted[]>; most: number }) {
  const all = ways.value;
  const set = (number: number, wanted: Wanted | null) => {
    ways.value = all.flatMap((one, place) => (place !== number ? [one] : wanted ? [wanted] : []));
  };
  return (
    <fieldset class="ways">
      <legend>Ways</legend>
      {all.map((wanted, number) => (
        <Way key={number} number={number} wanted={wanted} canLeave={all.length > 2} onSet={(way) => set(number, way)} />
      ))}
      {all.length < most && (
        <Button onClick={() => (ways.value = [...all, { selector: "cacheblend", recompute_ratio: 0.15 }])}>Add a way</Button>
      )}
    </fieldset>
  );
}

interface WayProps {
  number: number;
  wanted: Wanted;
  canLeave: boolean;
  onSet: (wanted: Wanted | null) => void;
}

function Way({ number, wanted, canLeave, onSet }: WayProps) {
  const isPlain = wanted.recompute_ratio === 1;
  const selectors = settings.value?.selectors ?? [wanted.selector ?? ""];
  const choose = (selector: string) =>
    onSet(selector === "" ? { recompute_ratio: 1 } : { selector, recompute_ratio: ratioFor(selector, wanted) });
  return (
    <div class="way row">
      <select aria-label={`Way ${number + 1}`} value={isPlain ? "" : wanted.selector} onChange={(event) => choose(event.currentTarget.value)}>
        <option value="">full prefill (plain)</option>
        {selectors.map((selector) => (
          <option key={selector}>{selector}</option>
        ))}
      </select>
      {!isPlain && (
        <label class="row small">
          ratio
          <NumberInput
            value={wanted.recompute_ratio ?? 0.15}
            min={0}
            max={0.95}
            step={0.05}
            onSet={(recompute_ratio) => onSet({ ...wanted, recompute_ratio })}
          />
        </label>
      )}
      {canLeave && (
        <Button kind="quiet" label={`Leave out way ${number + 1}`} onClick={() => (keepFocus(".ways select"), onSet(null))}>
          ✕
        </Button>
      )}
    </div>
  );
}

function ratioFor(selector: string, { recompute_ratio: before }: Wanted): number {
  if (selector === "full_reuse") return 0;
  return before && before < 1 ? before : 0.15;
}

interface NumberProps {
  value: number;
  min: number;
  max: number;
  step?: number;
  onSet: (value: number) => void;
}

export function NumberInput({ value, min, max, step = 1, onSet }: NumberProps) {
  const set = (given: number) => Number.isFinite(given) && onSet(Math.min(Math.max(given, min), max));
  return (
    <input type="number" value={value} min={min} max={max} step={step} onChange={(event) => set(event.currentTarget.valueAsNumber)} />
  );
}
