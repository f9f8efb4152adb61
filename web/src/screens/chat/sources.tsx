// The chunks behind an answer, best first: what they say, how near they are, and whether their KV was reused.
import { OutcomeBadge } from "../../components/outcome";
import { isStoredAgain } from "../../detail/outcomes";
import { count } from "../../format";
import { hrefOf } from "../../router";
import { isRunning, picked, type Answer, type Source } from "./model";

export function Sources({ answer }: { answer: Answer }) {
  const sources = answer.sources ?? [];
  if (!sources.length) {
    const words = isRunning(answer) ? "They come with the end of the answer." : "No chunk was put into this prompt.";
    return <p class="muted body">{answer.settings.retrieve ? words : "This answer is not from documents."}</p>;
  }
  return (
    <ol class="sources">
      {sources.map((source, number) => (
        <SourceCard key={number} source={source} number={number} answer={answer} />
      ))}
    </ol>
  );
}

function SourceCard({ source, number, answer }: { source: Source; number: number; answer: Answer }) {
  return (
    <li class="source" id={cardId(answer, number)} tabIndex={-1}>
      <div class="row">
        <b>[{number + 1}]</b>
        <a class="clip grow" href={hrefOf("documents", source.document_id)} title={source.name}>
          {source.name || "unnamed"}
        </a>
        {source.outcome && <OutcomeBadge outcome={source.outcome} />}
      </div>
      <div class="row small muted">
        <span title="Cosine between the chunk's vector and the question's">
          score <b>{source.score.toFixed(2)}</b>
        </span>
        <meter aria-label="Relevance" min={0} max={1} value={Math.max(0, source.score)} />
        {source.tokens != null && source.tokens > 0 && <span>{count(source.tokens)} tokens</span>}
        {source.tier && <span>{source.tier}</span>}
        {source.hash && <code title={source.hash}>#{source.hash.slice(0, 8)}</code>}
      </div>
      {source.text && <ChunkText text={source.text} />}
      {source.remedy && (
        <p class="small">
          {source.detail} <b>{source.remedy}</b>{" "}
          {answer.requestId && source.outcome && isStoredAgain(source.outcome) && (
            <a href={hrefOf("requests", answer.requestId)}>Store it again</a>
          )}
        </p>
      )}
    </li>
  );
}

const SUMMARY_CHARS = 180;

function ChunkText({ text }: { text: string }) {
  if (text.length <= SUMMARY_CHARS) return <p class="chunk-text">{text}</p>;
  return (
    <details class="chunk-text">
      <summary>{text.slice(0, SUMMARY_CHARS).replace(/\s+\S*$/, "")} …</summary>
      <p>{text}</p>
    </details>
  );
}

function cardId(answer: Answer, number: number): string {
  return `source-${answer.id}-${number}`;
}

/** Lead to the card of a source; the card takes the focus. */
export function showSource(answer: Answer, number: number): void {
  picked.value = answer.id;
  const inline = document.getElementById(`sources-${answer.id}`);
  if (inline instanceof HTMLDetailsElement) inline.open = true;
  // The side shows this answer's cards only after the next drawing.
  setTimeout(() => {
    const card = document.getElementById(cardId(answer, number));
    card?.scrollIntoView({ block: "nearest" });
    card?.focus();
  });
}
