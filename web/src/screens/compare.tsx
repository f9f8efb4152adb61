// One prompt answered in two to four ways, in turns: what each costs, and what it does to the answer; or many questions.
import { useEffect, useRef, useState } from "preact/hooks";

import { ask, isAbort, wordsOf } from "../api/client";
import { Busy, Button, Notice } from "../components/base";
import { Calibration } from "../compare/question-set";
import { Chart } from "../compare/chart";
import { Columns } from "../compare/columns";
import { type Asked, CompareForm } from "../compare/form";
import { type Comparison, nameOf } from "../compare/types";
import { go, hrefOf } from "../router";
import { has, loadSettings, settings } from "../server";

const SETS = "questions";

export function CompareScreen({ id }: { id: string }) {
  useEffect(() => void loadSettings(), []);
  const cannot = settings.value !== null && !has("/v1/compare");
  return (
    <div class="page">
      <div class="views" role="group" aria-label="What to compare on">
        {[
          ["", "One prompt"],
          [SETS, "A set of questions"],
        ].map(([view, words]) => (
          <Button key={view} aria-pressed={id === view} onClick={() => go(hrefOf("compare", view))}>
            {words}
          </Button>
        ))}
      </div>
      {cannot && <Notice tone="warn">This server cannot compare: it is of an earlier version.</Notice>}
      {id === SETS ? <Calibration cannot={cannot} /> : <OnePrompt />}
    </div>
  );
}

function OnePrompt() {
  const [comparison, setComparison] = useState<Comparison | null>(null);
  const [error, setError] = useState("");
  const abort = useRef<AbortController | null>(null);
  // Nobody waits any more once the screen is left.
  useEffect(() => () => abort.current?.abort(), []);
  const [busy, setBusy] = useState(false);
  const run = async ({ prompt, k, max_tokens, columns }: Asked) => {
    const { signal } = (abort.current = new AbortController());
    const body = { messages: [{ role: "user", content: prompt }], max_tokens, columns, ...(k > 0 && { retrieve: { k } }) };
    setBusy(true);
    setError("");
    try {
      setComparison(await ask<Comparison>("/v1/compare", { body, signal }));
    } catch (failure) {
      if (!isAbort(failure)) setError(wordsOf(failure));
    }
    setBusy(false);
  };
  const points = comparison?.columns.flatMap((column) =>
    column.agreement === null ? [] : [{ ...column, name: nameOf(column), agreement: column.agreement }],
  );
  return (
    <>
      <CompareForm busy={busy} onRun={(asked) => void run(asked)} onStop={() => abort.current?.abort()} />
      {busy && <Busy>Answering in turns</Busy>}
      {error && <Notice tone="bad">{error}</Notice>}
      {comparison && !busy && (
        <>
          <Columns columns={comparison.columns} reference={comparison.reference?.answer ?? null} />
          <Chart points={points ?? []} />
        </>
      )}
    </>
  );
}
