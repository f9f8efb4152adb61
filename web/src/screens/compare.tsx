// One prompt answered in two to four ways, in turns: what each costs, and what it does to the answer.
import { useEffect, useRef, useState } from "preact/hooks";

import { ask, isAbort, wordsOf } from "../api/client";
import { Busy, Notice } from "../components/base";
import { Chart } from "../compare/chart";
import { Columns } from "../compare/columns";
import { type Asked, CompareForm } from "../compare/form";
import type { Comparison } from "../compare/types";
import { has, loadSettings, settings } from "../server";

export function CompareScreen() {
  const [comparison, setComparison] = useState<Comparison | null>(null);
  const [error, setError] = useState("");
  const abort = useRef<AbortController | null>(null);
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
  useEffect(() => void loadSettings(), []);
  const cannot = settings.value !== null && !has("/v1/compare");
  return (
    <div class="page">
      {cannot && <Notice tone="warn">This server cannot compare: it is of an earlier version.</Notice>}
      <CompareForm busy={busy} onRun={run} onStop={() => abort.current?.abort()} />
      {busy && <Busy>Answering in turns</Busy>}
      {error && <Notice tone="bad">{error}</Notice>}
      {comparison && !busy && (
        <>
          <Columns columns={comparison.columns} reference={comparison.reference?.answer ?? null} />
          <Chart columns={comparison.columns} />
        </>
      )}
    </div>
  );
}
