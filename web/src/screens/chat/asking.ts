// Asking the server and taking in its answer, part by part.
import { signal } from "@preact/signals";

import { ApiError, ask, askStream, isAbort, wordsOf } from "../../api/client";
import type { components } from "../../api/schema";
import type { List, Report, RequestSummary, Retrieved, UsedChunk } from "../../api/types";
import { has, loadSettings } from "../../server";
import { textsOf } from "./chunk-texts";
import {
  addTurn,
  begin,
  changeTurn,
  chosen,
  conversations,
  newId,
  open,
  picked,
  shownAnswer,
  type Answer,
  type Conversation,
  type Settings,
  type Source,
  type Turn,
} from "./model";

interface Chunk {
  id: string;
  choices: { delta: { content?: string }; finish_reason: string | null }[];
  fused_kv?: Report & { retrieved?: Retrieved[]; chunks?: UsedChunk[] };
}

type Support = components["schemas"]["SupportOfAnswer"];

/** The answers under way: their ids, and what stops them. */
export const running = signal<ReadonlyMap<string, AbortController>>(new Map());

/** Ask a question in the open conversation, or in a new one. */
export function askQuestion(question: string): void {
  const conversation = open.value ?? begin();
  const turn = { id: newId(), question, answers: [], shown: 0 };
  addTurn(conversation.id, turn);
  void answer(conversation.id, turn.id, chosen.value);
}

/** Ask a turn's question again with the settings chosen now; the answers before are kept beside it. */
export function retry(conversation: string, turn: string): void {
  void answer(conversation, turn, chosen.value);
}

export function stop(id?: string): void {
  for (const [one, abort] of running.value) if (id === undefined || id === one) abort.abort();
}

async function answer(conversation: string, turn: string, wanted: Settings): Promise<void> {
  const id = newId();
  const abort = new AbortController();
  const messages = messagesBefore(conversations.value.find((one) => one.id === conversation), turn);
  const change = (more: Partial<Answer> | ((now: Answer) => Partial<Answer>)) =>
    changeTurn(conversation, turn, (now) => ({
      ...now,
      answers: now.answers.map((one) =>
        one.id === id ? { ...one, ...(typeof more === "function" ? more(one) : more) } : one,
      ),
    }));
  changeTurn(conversation, turn, (now) => ({
    ...now,
    answers: [...now.answers, { id, text: "", status: "waiting", settings: wanted }],
    shown: now.answers.length,
  }));
  picked.value = id;
  running.value = new Map(running.value).set(id, abort);
  try {
    const model = (await loadSettings())?.model ?? "";
    const body = { model, messages, ...optionsOf(wanted) };
    for await (const chunk of askStream<Chunk>("/v1/chat/completions", { body, signal: abort.signal, name: id })) {
      const choice = chunk.choices[0];
      const text = choice?.delta.content ?? "";
      change((now) => ({
        requestId: chunk.id,
        text: now.text + text,
        status: "streaming",
        ...(choice?.finish_reason ? { finish: choice.finish_reason } : {}),
        ...(chunk.fused_kv ? { report: chunk.fused_kv, sources: sourcesOf(chunk.fused_kv) } : {}),
      }));
    }
    change({ status: "done" });
  } catch (error) {
    if (isAbort(error)) change({ status: "stopped" });
    else change({ status: "failed", error: wordsOf(error) });
  } finally {
    const left = new Map(running.value);
    left.delete(id);
    running.value = left;
  }
  const question = messages.at(-1)?.content ?? "";
  await complete(question, change, () => find(conversation, turn)?.answers.find((one) => one.id === id));
}

function find(conversation: string, turn: string): Turn | undefined {
  return conversations.value.find((one) => one.id === conversation)?.turns.find((one) => one.id === turn);
}

/** Look up what an answer does not bring itself: texts of chunks, the time saved, what no chunk supports. */
async function complete(
  question: string,
  change: (more: Partial<Answer>) => void,
  found: () => Answer | undefined,
): Promise<void> {
  const done = found();
  if (done?.status !== "done") return;
  if (done.sources) change({ sources: await textsOf(done.sources) });
  change({ savedS: await savedBy(done.requestId) });
  const chunks = found()?.sources?.flatMap((one) => one.text ?? []) ?? [];
  if (!chunks.length || !done.text.trim()) return;
  const support = await ifThere<Support>("/v1/support", { answer: done.text, chunks: [...chunks, question] });
  if (support) change({ unsupported: support.spans.map((one) => one.text) });
}

const LOOKS = 4;
const LOOK_MS = 250;

/** Return the seconds that a request has saved, as far as the server knows; it notes them after the answer. */
async function savedBy(id: string | undefined): Promise<number | null> {
  for (let look = 0; look < LOOKS; look += 1) {
    const rows = await ifThere<List<RequestSummary>>("/v1/requests", undefined, "?limit=20");
    if (!rows) return null;
    const row = rows.data.find((one) => one.id === id);
    if (row) return row.saved_s;
    await new Promise((done) => setTimeout(done, LOOK_MS));
  }
  return null;
}

/** Ask for what an older server, or one that keeps nothing, does not have; without it the answer stands as it is. */
async function ifThere<T>(path: string, body?: unknown, query = ""): Promise<T | undefined> {
  if (!has(path)) return undefined;
  try {
    return await ask<T>(path + query, { body });
  } catch (error) {
    if (error instanceof ApiError || error instanceof TypeError) return undefined;
    throw error;
  }
}

function messagesBefore(conversation: Conversation | undefined, turn: string): { role: string; content: string }[] {
  const turns = conversation?.turns ?? [];
  const last = turns.findIndex((one) => one.id === turn);
  const messages = turns.slice(0, last).flatMap((one) => {
    const said = shownAnswer(one);
    if (!said || said.status === "failed" || !said.text) return [];
    return [
      { role: "user", content: one.question },
      { role: "assistant", content: said.text },
    ];
  });
  return [...messages, { role: "user", content: turns[last]?.question ?? "" }];
}

function optionsOf(wanted: Settings): Record<string, unknown> {
  // The scores by which tokens are chosen, for the request's screen.
  const fused: Record<string, unknown> = { trace: true };
  if (wanted.ratio !== "server") fused.recompute_ratio = wanted.ratio;
  if (wanted.selector) fused.selector = wanted.selector;
  if (wanted.retrieve) fused.retrieve = { k: wanted.k };
  return {
    stream: true,
    max_tokens: wanted.maxTokens,
    temperature: wanted.temperature,
    fused_kv: fused,
  };
}

function sourcesOf(report: NonNullable<Chunk["fused_kv"]>): Source[] {
  return (report.retrieved ?? []).map((one, position) => {
    const same = report.chunks?.find((chunk) => chunk.document_id === one.document_id && chunk.score === one.score);
    // Verdicts on what was retrieved stand in its order.
    const verdict = report.verdicts[position];
    return {
      ...one,
      text: same?.text ?? undefined,
      tier: same?.tier ?? null,
      tokens: same?.tokens ?? verdict?.tokens,
      outcome: verdict?.outcome,
      hash: verdict?.chunk_id ?? null,
      remedy: verdict?.remedy,
      detail: verdict?.detail,
    };
  });
}
