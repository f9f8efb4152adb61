// Which ratio is enough for one's own questions: asked one by one, in several ways, and weighed against time.
import { useEffect, useRef, useState } from "preact/hooks";

import { isAbort, wordsOf } from "../api/client";
import { Button, Field, Notice, Panel, Progress } from "../components/base";
import { keepFocus } from "../components/focus";
import { percent, plural, seconds } from "../format";
import { chosen } from "../screens/chat/model";
import { stored } from "../stored";
import { type Advice, advice, calibrate, type Figures, mean, median, type Tally } from "./calibration";
import { Chart } from "./chart";
import { kl, share } from "./columns";
import { NumberInput, Ways } from "./form";
import { questionsOf } from "./questions";
import { nameOf, type Wanted } from "./types";

const MOST_WAYS = 8;
const ways = stored<Wanted[]>(
  "compare.set.ways",
  [0, 0.05, 0.15, 0.3].map((recompute_ratio) => ({ selector: "sink_attention", recompute_ratio })),
);
const kept = stored("compare.set", { text: "", k: 4, tokens: 16, wanted: 95 });

export function Calibration({ cannot }: { cannot: boolean }) {
  const [tally, setTally] = useState<Tally | null>(null);
  const [asked, setAsked] = useState(0);
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const abort = useRef<AbortController | null>(null);
  // Nobody waits any more once the screen is left.
  useEffect(() => () => abort.current?.abort(), []);
  const run = async (questions: string[]) => {
    const { signal } = (abort.current = new AbortController());
    const { k, tokens } = kept.value;
    setTally(null);
    setAsked(questions.length);
    setError("");
    setBusy(true);
    try {
      await calibrate({ questions, ways: ways.value, k, max_tokens: tokens }, signal, setTally);
    } catch (failure) {
      if (!isAbort(failure)) setError(wordsOf(failure));
    }
    setBusy(false);
  };
  const done = tally?.done ?? 0;
  return (
    <>
      <SetForm busy={busy} cannot={cannot} onRun={(questions) => void run(questions)} onStop={() => abort.current?.abort()} onWrong={setError} />
      {busy && (
        <div class="stack" role="status">
          <span>
            Question {Math.min(done + 1, asked)} of {asked}
          </span>
          <Progress label="Questions answered" share={done / asked} />
        </div>
      )}
      {error && <Notice tone="bad">{error}</Notice>}
      {tally && !busy && done < asked && !error && <Notice>Stopped after {plural(done, "question")} of {asked}.</Notice>}
      {tally && <Results tally={tally} busy={busy} />}
    </>
  );
}

interface SetFormProps {
  busy: boolean;
  cannot: boolean;
  onRun: (questions: string[]) => void;
  onStop: () => void;
  onWrong: (words: string) => void;
}

function SetForm({ busy, cannot, onRun, onStop, onWrong }: SetFormProps) {
  const { text, k, tokens, wanted } = kept.value;
  const change = (more: Partial<typeof kept.value>) => (kept.value = { ...kept.value, ...more });
  const read = (from: string, use: (questions: string[]) => void) => {
    try {
      use(questionsOf(from));
      onWrong("");
    } catch (error) {
      onWrong(wordsOf(error));
    }
  };
  const submit = (event: Event) => {
    event.preventDefault();
    if (!busy && !cannot && text.trim()) read(text, onRun);
  };
  const choose = async (event: { currentTarget: HTMLInputElement }) => {
    const input = event.currentTarget;
    const file = input.files?.[0];
    if (file) read(await file.text(), (questions) => change({ text: questions.join("\n") }));
    input.value = "";
  };
  return (
    <Panel title="Which ratio is enough for your questions?">
      <form class="stack" onSubmit={submit}>
        <Field label="Questions, one on a line" hint="They are answered from your documents. Lines of a .jsonl file need a field “question”.">
          <textarea rows={6} value={text} data-focus onInput={(event) => change({ text: event.currentTarget.value })} />
        </Field>
        <Field label="Or take them from a file">
          <input type="file" accept=".txt,.jsonl" onChange={(event) => void choose(event)} />
        </Field>
        <div class="row">
          <Field label="Chunks to retrieve" hint="0: questions as they are">
            <NumberInput value={k} min={0} max={50} onSet={(k) => change({ k })} />
          </Field>
          <Field label="Answer, at most tokens" hint="So many are compared">
            <NumberInput value={tokens} min={1} max={128} onSet={(tokens) => change({ tokens })} />
          </Field>
          <Field label="Wanted agreement, %" hint="With full prefill">
            <NumberInput value={wanted} min={50} max={100} onSet={(wanted) => change({ wanted })} />
          </Field>
        </div>
        <Ways ways={ways} most={MOST_WAYS} />
        <div class="row">
          <Button type="submit" kind="primary" busy={busy} disabled={cannot || !text.trim()}>
            {busy ? "Asking…" : "Calibrate"}
          </Button>
          {busy && (
            <Button data-stop onClick={() => (keepFocus("[type=submit]"), onStop())}>
              Stop
            </Button>
          )}
          <span class="muted small">Each question is answered in each way and by full prefill, in turns.</span>
        </div>
      </form>
    </Panel>
  );
}

function Results({ tally, busy }: { tally: Tally; busy: boolean }) {
  const found = advice(tally, kept.value.wanted / 100);
  const judged = tally.ways.filter((one) => one.agreements.length);
  const full = { name: "full prefill", ttft_s: median(tally.full_s), agreement: 1, kl: 0 };
  const points = judged.map(({ way, agreements, kls, ttfts_s }) => ({
    name: nameOf(way),
    ttft_s: median(ttfts_s),
    agreement: mean(agreements),
    kl: mean(kls),
  }));
  return (
    <>
      {found && !busy && <Recommended found={found} />}
      {tally.failed.length > 0 && (
        <Notice tone="warn">
          {plural(tally.failed.length, "question was", "questions were")} not taken: {tally.failed[0]!.question.slice(0, 80)}: {tally.failed[0]!.why}
        </Notice>
      )}
      {judged.length > 0 && (
        <>
          <Table tally={tally} judged={judged} />
          <Chart points={[full, ...points]} />
        </>
      )}
    </>
  );
}

function Recommended({ found: { words, way } }: { found: Advice }) {
  const [said, say] = useState("");
  const adopt = () => {
    chosen.value = { ...chosen.value, ratio: way?.recompute_ratio ?? 1, selector: way?.selector ?? "" };
    say("The next answers in Chat are made so.");
  };
  return (
    <Panel title="Recommendation">
      <div class="stack">
        <p>{words}</p>
        {way && (
          <p class="muted small">
            For all clients of the server: <code>fused-kv serve --recompute-ratio {way.recompute_ratio} --selector {way.selector}</code>
          </p>
        )}
        <div class="row">
          <Button onClick={adopt}>{way ? "Use it in Chat" : "Use full prefill in Chat"}</Button>
          <span role="status">{said}</span>
        </div>
      </div>
    </Panel>
  );
}

function Table({ tally, judged }: { tally: Tally; judged: Figures[] }) {
  const full_s = median(tally.full_s);
  return (
    <Panel title={`After ${plural(tally.full_s.length, "question")}`}>
      <div class="scroll-x" tabIndex={0} role="region" aria-label="Ways by quality and time">
        <table>
          <thead>
            <tr>
              <th scope="col">Way</th>
              <th scope="col" class="number">First token, median</th>
              <th scope="col" class="number">Of full prefill’s</th>
              <th scope="col" class="number">Agreement, mean</th>
              <th scope="col" class="number">Worst question</th>
              <th scope="col" class="number">KL, mean</th>
            </tr>
          </thead>
          <tbody>
            <tr>
              <th scope="row">full prefill</th>
              <td class="number">{seconds(full_s)}</td>
              <td class="number">100 %</td>
              <td class="number">100 %</td>
              <td class="number">100 %</td>
              <td class="number">0</td>
            </tr>
            {judged.map(({ way, agreements, kls, ttfts_s }) => (
              <tr key={nameOf(way)}>
                <th scope="row">{nameOf(way)}</th>
                <td class="number">{seconds(median(ttfts_s))}</td>
                <td class="number">{percent(median(ttfts_s), full_s)}</td>
                <td class="number">{share(mean(agreements))}</td>
                <td class="number">{share(Math.min(...agreements))}</td>
                <td class="number">{kl(mean(kls))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}
