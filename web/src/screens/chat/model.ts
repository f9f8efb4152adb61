// Conversations: what was asked and answered, kept in this browser only.
import { computed, signal } from "@preact/signals";

import type { Report } from "../../api/types";
import { stored } from "../../stored";

export interface Settings {
  retrieve: boolean;
  k: number;
  /** "server" leaves it to the server's default. */
  ratio: number | "auto" | "adaptive" | "server";
  selector: string;
  maxTokens: number;
  temperature: number;
}

/** A chunk that was put into the prompt; its text is looked up where the answer does not bring it. */
export interface Source {
  document_id: string;
  name: string;
  chunk: number;
  score: number;
  text?: string;
  tier?: string | null;
  tokens?: number;
  outcome?: string;
  hash?: string | null;
  remedy?: string;
  detail?: string;
}

export type Status = "waiting" | "streaming" | "done" | "stopped" | "failed";

export interface Answer {
  id: string;
  text: string;
  status: Status;
  settings: Settings;
  error?: string;
  /** Of the request, for /#/requests/ID. */
  requestId?: string;
  report?: Report;
  sources?: Source[];
  savedS?: number | null;
  /** Words that no source holds. */
  unsupported?: string[];
  finish?: string;
}

export interface Turn {
  id: string;
  question: string;
  answers: Answer[];
  shown: number;
}

export interface Conversation {
  id: string;
  title: string;
  createdS: number;
  turns: Turn[];
}

const MOST_KEPT = 40;
export const DEFAULTS: Settings = {
  retrieve: true,
  k: 4,
  ratio: "server",
  selector: "",
  maxTokens: 128,
  temperature: 0,
};

export const chosen = stored<Settings>("chat.settings", DEFAULTS);
export const conversations = stored<Conversation[]>("chat.conversations", []);
export const openId = stored<string>("chat.open", "");
export const open = computed(() => conversations.value.find((one) => one.id === openId.value));
/** Which answer's sources are shown at the side: the last one unless another was chosen. */
export const picked = signal("");

// What a closed tab left unfinished will not go on.
for (const turn of conversations.peek().flatMap((one) => one.turns)) {
  for (const answer of turn.answers) if (isRunning(answer)) answer.status = "stopped";
}

export function isRunning(answer: Answer): boolean {
  return answer.status === "waiting" || answer.status === "streaming";
}

export function shownAnswer(turn: Turn): Answer | undefined {
  return turn.answers[turn.shown];
}

export function newId(): string {
  return crypto.randomUUID ? crypto.randomUUID() : Array.from(crypto.getRandomValues(new Uint32Array(4))).join("-");
}

export function begin(turns: Turn[] = [], title = ""): Conversation {
  const made = { id: newId(), title, createdS: Date.now() / 1000, turns };
  conversations.value = [made, ...conversations.value].slice(0, MOST_KEPT);
  openId.value = made.id;
  return made;
}

export function forget(id: string): void {
  conversations.value = conversations.value.filter((one) => one.id !== id);
  if (openId.value === id) openId.value = conversations.value[0]?.id ?? "";
}

/** Change a turn of a conversation; everything that shows it is drawn again. */
export function changeTurn(conversation: string, turn: string, change: (turn: Turn) => Turn): void {
  conversations.value = conversations.value.map((one) =>
    one.id === conversation ? { ...one, turns: one.turns.map((each) => (each.id === turn ? change(each) : each)) } : one,
  );
}

export function addTurn(conversation: string, turn: Turn): void {
  conversations.value = conversations.value.map((one) =>
    one.id === conversation ? { ...one, title: one.title || turn.question.slice(0, 60), turns: [...one.turns, turn] } : one,
  );
}

/** Begin another conversation that has the turns up to one of this one. */
export function fork(from: Conversation, turn: Turn): void {
  const last = from.turns.findIndex((one) => one.id === turn.id);
  const turns = structuredClone(from.turns.slice(0, last + 1)).map((one) => ({ ...one, id: newId() }));
  begin(turns, `${from.title.replace(/ \(fork\)$/, "")} (fork)`);
}
