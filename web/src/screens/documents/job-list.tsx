// How far each ingestion is; it can be cancelled, and resumed without a second upload.
import type { Job } from "../../api/types";
import { Badge, Button, Notice, Panel, Progress, type Tone } from "../../components/base";
import { keepFocus } from "../../components/focus";
import { hrefOf } from "../../router";
import { cancel, dismiss, hasEnded, isResumable, jobs, resume, type Watched } from "./jobs";

const WORDS: Record<Job["state"], string> = {
  queued: "waiting",
  parsing: "reading",
  chunking: "splitting",
  prefilling: "computing KV",
  embedding: "embedding",
  done: "done",
  failed: "failed",
  cancelled: "cancelled",
  interrupted: "interrupted",
};

export function JobList() {
  if (!jobs.value.length) return null;
  const ended = jobs.value.filter((one) => hasEnded(one.job));
  const clear = ended.length > 0 && (
    <Button kind="quiet" onClick={() => (keepFocus(".drop input"), ended.forEach(dismiss))}>
      Clear ended
    </Button>
  );
  return (
    <Panel title="Ingestion" actions={clear}>
      <ul class="jobs" aria-live="polite" aria-label="Ingestions">
        {jobs.value.map((one) => (
          <JobRow key={one.job.id} watched={one} />
        ))}
      </ul>
    </Panel>
  );
}

function JobRow({ watched }: { watched: Watched }) {
  const { job, name } = watched;
  const share = job.total ? job.done / job.total : undefined;
  return (
    <li>
      <div class="row">
        <a class="grow clip" href={hrefOf("documents", job.document_id)} title={name}>
          {name || "unnamed"}
        </a>
        <Badge tone={toneOf(job)}>{WORDS[job.state]}</Badge>
        {job.total > 0 && (
          <small>
            {job.done} of {job.total}
          </small>
        )}
        {job.state === "done" && <a href={hrefOf("chat")}>Ask about it</a>}
        {(!hasEnded(job) || isResumable(job)) && <Toggle watched={watched} />}
      </div>
      {!hasEnded(job) && <Progress label={`Ingestion of ${name}`} share={share} />}
      {(job.error ?? watched.error) && <Notice tone="bad">{job.error ?? watched.error}</Notice>}
    </li>
  );
}

/** One button that cancels or resumes, so that it keeps the focus. */
function Toggle({ watched }: { watched: Watched }) {
  const [words, act] = hasEnded(watched.job) ? (["Resume", resume] as const) : (["Cancel", cancel] as const);
  return (
    <Button onClick={() => void act(watched)} aria-label={`${words} ${watched.name}`}>
      {words}
    </Button>
  );
}

function toneOf(job: Job): Tone {
  if (job.state === "done") return "good";
  if (job.state === "failed") return "bad";
  return hasEnded(job) ? "warn" : "info";
}
