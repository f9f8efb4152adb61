// A question with its answers, and what an answer cost.
import { useEffect, useRef, useState } from "preact/hooks";

import { ask } from "../../api/client";
import type { components } from "../../api/schema";
import { Badge, Button, Notice } from "../../components/base";
import { keepFocus } from "../../components/focus";
import { Markdown } from "../../components/markdown";
import { StateBar } from "../../components/states";
import { bytes, count, plural, seconds } from "../../format";
import { hrefOf } from "../../router";
import { has, settings } from "../../server";
import { retry } from "./asking";
import { COMPOSER } from "./composer";
import { changeTurn, fork, isRunning, picked, shownAnswer, type Answer, type Conversation, type Turn } from "./model";
import { settingsInWords } from "./settings";
import { Sources, showSource } from "./sources";

interface Props {
  conversation: Conversation;
  turn: Turn;
  wide: boolean;
}

export function TurnView({ conversation, turn, wide }: Props) {
  const answer = shownAnswer(turn);
  const end = useRef<HTMLDivElement>(null);
  const isLast = conversation.turns.at(-1)?.id === turn.id;
  useEffect(() => {
    if (isLast) end.current?.scrollIntoView({ block: "nearest" });
  }, [isLast, answer?.text, answer?.status]);
  return (
    <article class="turn">
      <h2 class="question wrap">{turn.question}</h2>
      {answer && <AnswerView key={answer.id} answer={answer} wide={wide} />}
      {answer && !isRunning(answer) && (
        <div class="row answer-actions">
          <Versions conversation={conversation} turn={turn} />
          <Button kind="quiet" onClick={() => (keepFocus(COMPOSER), retry(conversation.id, turn.id))}>
            Retry with these settings
          </Button>
          <Button kind="quiet" onClick={() => (keepFocus(COMPOSER), fork(conversation, turn))}>
            Fork from here
          </Button>
          {wide && (
            <Button kind="quiet" aria-pressed={picked.value === answer.id} onClick={() => (picked.value = answer.id)}>
              Sources
            </Button>
          )}
        </div>
      )}
      <div ref={end} />
    </article>
  );
}

function Versions({ conversation, turn }: { conversation: Conversation; turn: Turn }) {
  if (turn.answers.length < 2) return null;
  const show = (shown: number) => {
    changeTurn(conversation.id, turn.id, (now) => ({ ...now, shown }));
    picked.value = turn.answers[shown]?.id ?? "";
  };
  return (
    <span class="row versions">
      <Button kind="quiet" label="Answer before" disabled={turn.shown === 0} onClick={() => show(turn.shown - 1)}>
        ‹
      </Button>
      <span>
        answer {turn.shown + 1} of {turn.answers.length}
      </span>
      <Button
        kind="quiet"
        label="Next answer"
        disabled={turn.shown === turn.answers.length - 1}
        onClick={() => show(turn.shown + 1)}
      >
        ›
      </Button>
    </span>
  );
}

const LOW_SCORE = 0.3;

function AnswerView({ answer, wide }: { answer: Answer; wide: boolean }) {
  const sources = answer.sources ?? [];
  const best = Math.max(...sources.map((one) => one.score));
  return (
    <div class="reply">
      {sources.length > 0 && best < LOW_SCORE && (
        <Notice tone="warn">
          Low relevance: the nearest chunk scores {best.toFixed(2)}. The documents may not answer this question.
        </Notice>
      )}
      <div aria-live="polite" aria-busy={isRunning(answer)}>
        {answer.status === "waiting" && <Waiting name={answer.id} />}
        <Markdown
          text={answer.text}
          sources={sources.length}
          onCite={(number) => showSource(answer, number)}
          unsupported={answer.unsupported}
        />
        {answer.status === "stopped" && <Badge tone="warn">stopped</Badge>}
        {answer.finish === "length" && <Badge>ended at the longest answer</Badge>}
      </div>
      {answer.error && <Notice tone="bad">{answer.error}</Notice>}
      {!!answer.unsupported?.length && (
        <p class="small muted">
          <span class="unsupported">Underlined</span>: words that stand in no retrieved chunk.
        </p>
      )}
      {sources.length > 0 && (
        <div class="row cites" role="group" aria-label="Sources of this answer">
          {sources.map((source, number) => (
            <button
              type="button"
              class="cite"
              key={number}
              title={source.name}
              aria-label={`Source ${number + 1}: ${source.name}`}
              onClick={() => showSource(answer, number)}
            >
              [{number + 1}]
            </button>
          ))}
        </div>
      )}
      {answer.report && <Footer answer={answer} />}
      {!wide && sources.length > 0 && (
        <details class="inline-sources" id={`sources-${answer.id}`}>
          <summary>Sources ({sources.length})</summary>
          <Sources answer={answer} />
        </details>
      )}
    </div>
  );
}

function Footer({ answer }: { answer: Answer }) {
  const report = answer.report;
  if (!report) return null;
  const step = report.seconds.step;
  const loaded = Object.entries(report.bytes_loaded).filter(([, size]) => size > 0);
  return (
    <footer class="answer-footer">
      <p>
        <b>{count(report.recomputed_tokens + report.fresh_tokens)}</b> of {count(report.prompt_tokens)} prompt tokens were
        computed, the KV of the others was at hand.
      </p>
      <StateBar counts={report} />
      <dl class="facts">
        <Fact name="First token" value={seconds(report.ttft_s)} />
        {!!step && <Fact name="Speed" value={`${(1 / step).toFixed(1)} tokens/s`} />}
        {answer.savedS != null && <Fact name="Saved (estimate)" value={seconds(answer.savedS)} />}
        {loaded.length > 0 && (
          <Fact name="KV" value={loaded.map(([tier, size]) => `${bytes(size)} from ${tier}`).join(", ")} />
        )}
        <Fact name="Settings" value={settingsInWords(answer.settings, settings.value)} />
      </dl>
      {answer.requestId && (
        <p>
          <a href={hrefOf("requests", answer.requestId)}>Details of this request</a>{" "}
          <span class="muted">which tokens those were, why, and what it saved</span>
        </p>
      )}
    </footer>
  );
}

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

const LOOK_MS = 700;

type Progress = components["schemas"]["Progress"];

/** What is going on before the first token: its place in the queue, as far as the server tells, and the seconds. */
function Waiting({ name }: { name: string }) {
  const [{ s, progress }, setState] = useState<{ s: number; progress: Progress | null }>({ s: 0, progress: null });
  useEffect(() => {
    const began = performance.now();
    const path = `/v1/requests/${encodeURIComponent(name)}/progress`;
    const look = async () => {
      const known = has("/v1/requests/{id_}/progress");
      const progress = known ? await ask<Progress>(path).catch(() => null) : null;
      setState({ s: (performance.now() - began) / 1000, progress });
    };
    const timer = setInterval(() => void look(), LOOK_MS);
    return () => clearInterval(timer);
  }, [name]);
  return (
    <p class="busy">
      {placeInWords(progress)}
      {s > 1 && ` · ${s.toFixed(0)} s`}
    </p>
  );
}

function placeInWords(progress: Progress | null): string {
  if (progress?.state !== "waiting" || progress.ahead == null) return "Reading the chunks and the question";
  return progress.ahead === 0 ? "Next in the queue" : `Waiting in the queue: ${plural(progress.ahead, "request")} before this one`;
}
