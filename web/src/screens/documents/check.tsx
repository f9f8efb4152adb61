// Would a text be reused in a prompt that contains it? If not: why, what differs, and a button that mends it.
import { useState } from "preact/hooks";

import { ask, wordsOf } from "../../api/client";
import type { Verdict } from "../../api/types";
import { Button, Notice, Panel } from "../../components/base";
import { Diff } from "../../components/diff";
import { OutcomeBadge } from "../../components/outcome";
import { count } from "../../format";
import { hasEnded, jobs, uploadText } from "./jobs";

// What storing exactly this text mends.
const MENDED = new Set(
  "not_ingested deleted evicted damaged other_settings respaced escaped shortened rewritten".split(" "),
);

export function CheckText() {
  const [text, setText] = useState("");
  const [verdict, setVerdict] = useState<Verdict | null>(null);
  const [wrong, setWrong] = useState("");
  const [busy, setBusy] = useState(false);
  const run = async (work: () => Promise<void>) => {
    setBusy(true);
    setWrong("");
    try {
      await work();
    } catch (error) {
      setWrong(wordsOf(error));
    }
    setBusy(false);
  };
  const check = async () => setVerdict(await ask<Verdict>("/v1/documents/check", { body: { text } }));
  const store = async () => {
    const job = await uploadText(`Checked: ${text.trim().slice(0, 40)}`, text);
    await ended(job.id);
    await check();
  };
  return (
    <Panel title="Check a text">
      <form class="stack" onSubmit={(event) => (event.preventDefault(), busy || void run(check))}>
        <textarea
          rows={4}
          aria-label="Text to check"
          placeholder="Paste a chunk as your application puts it into its prompt"
          value={text}
          onInput={(event) => (setText(event.currentTarget.value), setVerdict(null))}
        />
        <div class="row">
          <Button kind="primary" type="submit" busy={busy} disabled={!text.trim()}>
            Check
          </Button>
          {busy && <span role="status">Working</span>}
        </div>
        {wrong && <Notice tone="bad">{wrong}</Notice>}
        <div aria-live="polite">
          {verdict && <VerdictView verdict={verdict} busy={busy} onStore={() => void run(store)} />}
        </div>
      </form>
    </Panel>
  );
}

function VerdictView({ verdict, busy, onStore }: { verdict: Verdict; busy: boolean; onStore: () => void }) {
  return (
    <div class="stack verdict">
      <p class="row">
        <OutcomeBadge outcome={verdict.outcome} />
        {verdict.tokens > 0 && <span>{count(verdict.tokens)} tokens</span>}
        {verdict.chunk_id && <code title={verdict.chunk_id}>#{verdict.chunk_id.slice(0, 8)}</code>}
      </p>
      {verdict.detail && <p class="wrap">{verdict.detail}</p>}
      {verdict.diff && <Diff text={verdict.diff} />}
      {verdict.remedy && <p class="small wrap">{verdict.remedy}</p>}
      {MENDED.has(verdict.outcome) && (
        <div>
          <Button busy={busy} onClick={onStore}>
            Store this text
          </Button>
        </div>
      )}
    </div>
  );
}

/** Wait for a watched job's end. */
function ended(id: string): Promise<void> {
  return new Promise((done) => {
    const stop = jobs.subscribe((all) => {
      const found = all.find((one) => one.job.id === id);
      if (found && !hasEnded(found.job) && !found.error) return;
      // The subscription is called once before it is returned.
      queueMicrotask(() => stop());
      done();
    });
  });
}
