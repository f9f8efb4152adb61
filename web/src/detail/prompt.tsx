// The prompt as a heat map: by state, by selection score, by layer, or as a replay of what happened.

import type { ComponentChildren, RefObject } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Button, Panel } from "../components/base";
import { STATES, STATE_WORDS } from "../components/states";
import { count } from "../format";
import { byScore, byState, type Painting, SCORE_SHARES } from "./paint";
import { usePlaying } from "./playing";
import { PromptMap } from "./prompt-map";
import { PromptModel, type Segment } from "./prompt-model";
import { Replay } from "./replay";
import type { Trace } from "./types";

type View = "state" | "score" | "layer" | "replay";

const VIEWS: [View, string][] = [
  ["state", "State"],
  ["score", "Score"],
  ["layer", "Layer"],
  ["replay", "Replay"],
];

interface Props {
  trace: Trace;
  /** Names of the prompt's chunks, for their labels. */
  sources: (string | null)[];
  /** Given a function that shows a chunk. */
  shower?: RefObject<(chunk: number) => void> | undefined;
}

export function Prompt({ trace, sources, shower }: Props) {
  const model = useMemo(() => new PromptModel(trace), [trace]);
  const replay = useMemo(() => new Replay(model), [model]);
  const [view, setView] = useState<View>("state");
  const [layer, setLayer] = useState(0);
  const [step, setStep] = useState(0);
  const playing = usePlaying(step, replay.length, setStep);
  const shown = useMemo(() => (view === "replay" ? replay.step(step) : null), [view, step, replay]);
  const painting = useMemo<Painting>(() => {
    if (shown) return shown.painting;
    return view === "state" ? byState(model) : byScore(model, view === "layer" ? layer : -1);
  }, [model, view, layer, shown]);
  const layers = model.layers;
  return (
    <Panel title="Prompt" class="prompt">
      <div class="stack">
      <div class="views" role="group" aria-label="Colour the prompt by">
        {VIEWS.map(([one, name]) => (
          <Button
            aria-pressed={view === one}
            disabled={(one === "score" && !model.hasScores) || (one === "layer" && !layers.length)}
            onClick={() => setView(one)}
          >
            {name}
          </Button>
        ))}
      </div>
      {!model.hasScores && <NoScores model={model} />}
      {view === "layer" && (
        <Slider name="Layer" value={layer} last={layers.length - 1} said={`layer ${layers[layer]}`} onSet={setLayer} />
      )}
      {shown && (
        <Slider name="Step" value={step} last={replay.length - 1} said={shown.caption} onSet={playing.stopAt}>
          <Button onClick={playing.toggle}>{playing.isPlaying ? "Pause" : "Play"}</Button>
        </Slider>
      )}
      <Key view={view} />
      <Map model={model} painting={painting} sources={sources} shower={shower} />
      </div>
    </Panel>
  );
}

function NoScores({ model }: { model: PromptModel }) {
  const [, reused, recomputed] = model.counts();
  if (!reused && !recomputed) {
    return <p class="dim">No scores: no chunk’s stored KV was taken, so nothing had to be chosen.</p>;
  }
  return (
    <p class="dim">
      Scores are kept only for requests that ask for them, with <code>{'"fused_kv": {"trace": true}'}</code>.
    </p>
  );
}

interface SliderProps {
  name: string;
  value: number;
  last: number;
  said: string;
  onSet: (value: number) => void;
  children?: ComponentChildren;
}

function Slider({ name, value, last, said, onSet, children }: SliderProps) {
  return (
    <div class="slider">
      {children}
      <label>
        {name}
        <input
          type="range"
          min={0}
          max={Math.max(last, 0)}
          value={value}
          aria-valuetext={said}
          onInput={(event) => onSet(event.currentTarget.valueAsNumber)}
        />
      </label>
      <output>{said}</output>
    </div>
  );
}

/** What the paints mean, each shown on its own word. */
function Key({ view }: { view: View }) {
  if (view === "state") {
    return (
      <ul class="legend" data-mode="state">
        {STATES.map((state, paint) => (
          <li key={state}>
            <span class={`sample p${paint}`}>{state}</span> <small>{STATE_WORDS[state]}</small>
          </li>
        ))}
      </ul>
    );
  }
  if (view === "replay") {
    return (
      <ul class="legend" data-mode="replay">
        <li>
          <span class="sample p1">selected</span>
        </li>
        <li>
          <span class="sample p9">recomputed</span>
        </li>
        <li>
          <small>A replay from the request’s record, not at its speed.</small>
        </li>
      </ul>
    );
  }
  return (
    <ul class="legend" data-mode="score">
      <li>Strongest</li>
      {SCORE_SHARES.map((share, number) => (
        <li key={share}>
          <span class={`sample p${SCORE_SHARES.length - number}`}>{+(share * 100).toFixed(1)} %</span>
        </li>
      ))}
      <li>
        <small>of the chunks’ tokens</small>
      </li>
    </ul>
  );
}

interface MapProps extends Pick<Props, "sources" | "shower"> {
  model: PromptModel;
  painting: Painting;
}

function Map({ model, painting, sources, shower }: MapProps) {
  const root = useRef<HTMLDivElement>(null);
  const map = useRef<PromptMap | null>(null);
  const [token, setToken] = useState<number | null>(null);
  useEffect(() => {
    const made = new PromptMap(root.current!, model, painting, (segment) => labelOf(model, segment, sources));
    map.current = made;
    if (shower) {
      // The arrow keys go on from there.
      shower.current = (chunk) => {
        setToken(made.showChunk(chunk));
        root.current?.focus();
      };
    }
    return () => made.close();
  }, [model]);
  useEffect(() => map.current?.repaint(painting), [painting]);
  const point = (target: EventTarget | null) => {
    const under = map.current?.tokenAt(target) ?? null;
    if (under !== null) setToken(under);
  };
  const move = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -model.tokens, End: model.tokens }[event.key];
    if (!by) return;
    event.preventDefault();
    const from = token ?? (by > 0 ? -1 : 0);
    const next = Math.min(Math.max(from + by, 0), model.tokens - 1);
    setToken(next);
    map.current?.mark(next);
  };
  return (
    <>
      <div
        class="prompt-map"
        ref={root}
        tabIndex={0}
        role="region"
        aria-label="Prompt; left and right go from token to token"
        onKeyDown={move}
        onPointerOver={(event) => point(event.target)}
        onClick={(event) => point(event.target)}
      />
      <p class="inspector" aria-live="polite">
        {token === null ? "Point at a token, or go to it with the arrow keys." : described(model, token)}
      </p>
    </>
  );
}

function labelOf(model: PromptModel, segment: Segment, sources: (string | null)[]): string {
  const end = model.segments.find((later) => later.first > segment.first && later.begins)?.first ?? model.tokens;
  const counts = model.counts(segment.first, end);
  const parts = STATES.flatMap((state, number) =>
    counts[number] ? [`${count(counts[number]!)} ${state}`] : [],
  );
  const name = segment.chunk < 0 ? "Text" : `Chunk ${segment.chunk + 1}`;
  return [name, segment.chunk < 0 ? null : sources[segment.chunk], parts.join(", ")].filter(Boolean).join(" · ");
}

function described(model: PromptModel, token: number): string {
  const chunk = model.chunk[token]!;
  const score = model.hasScores ? model.scores(-1)[token]! : NaN;
  return [
    `Token ${count(token + 1)} “${model.text(token, token + 1).replace(/\n/g, "⏎")}”`,
    STATES[model.states[token]!]!,
    chunk >= 0 ? `chunk ${chunk + 1}` : "outside chunks",
    ...(Number.isNaN(score) ? [] : [`score ${score.toPrecision(3)}`]),
  ].join(" · ");
}
