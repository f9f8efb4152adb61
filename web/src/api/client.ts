// Requests to this server: the key, errors in words, JSON, and streams of events.
import { signal } from "@preact/signals";

import { stored } from "../stored";

/** The key that the user has typed; the tab forgets it. */
export const apiKey = stored<string>("key", "", true);
/** Whether the server has refused for want of a key. */
export const keyWanted = signal(false);

/** What the server refused, and in which words. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string | null = null,
  ) {
    super(message);
    this.name = "ApiError";
  }
}

export interface Options {
  method?: "GET" | "POST" | "PATCH" | "DELETE";
  /** Sent as JSON; a FormData as it is. */
  body?: unknown;
  signal?: AbortSignal;
  /** What the server calls the request (X-Request-Id). */
  name?: string;
}

/** Ask and return the JSON of the answer; throws ApiError. */
export async function ask<T>(path: string, options: Options = {}): Promise<T> {
  const answer = await send(path, options);
  return (await answer.json()) as T;
}

/** Ask and return the text of the answer. */
export async function askText(path: string, options: Options = {}): Promise<string> {
  return (await send(path, options)).text();
}

/** Ask and yield the events of the answer, until [DONE]. An error among them is thrown. */
export async function* askStream<T>(path: string, options: Options = {}): AsyncGenerator<T> {
  const answer = await send(path, options);
  if (!answer.body) return;
  for await (const text of events(answer.body)) {
    if (text === "[DONE]") return;
    const event: unknown = JSON.parse(text);
    const told = event as ErrorBody;
    // A job has a field of that name too, with a string.
    if (typeof told?.error === "object" && told.error !== null) throw errorOf(told, 500);
    yield event as T;
  }
}

/** Yield the data of server-sent events. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += decoder.decode(value, { stream: true });
      const parts = buffer.split("\n\n");
      buffer = parts.pop() ?? "";
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/** Return a query string, with "?" if there is anything to ask for. */
export function queryOf(values: Record<string, string | number | undefined | null>): string {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text ? `?${text}` : "";
}

/** Return an error's words, whatever was thrown. */
export function wordsOf(error: unknown): string {
  if (error instanceof ApiError) return error.message;
  if (error instanceof TypeError) return "The server cannot be reached. Is it still running?";
  return error instanceof Error ? error.message : String(error);
}

export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

interface ErrorBody {
  error?: { message: string; code?: string | null } | null;
}

async function send(path: string, { method, body, signal, name }: Options): Promise<Response> {
  const headers: Record<string, string> = {};
  if (name) headers["X-Request-Id"] = name;
  if (apiKey.value) headers.Authorization = `Bearer ${apiKey.value}`;
  const form = body instanceof FormData;
  if (body !== undefined && !form) headers["Content-Type"] = "application/json";
  const content = body === undefined || form ? (body as FormData | undefined) : JSON.stringify(body);
  const answer = await fetch(path, { method: method ?? (body === undefined ? "GET" : "POST"), headers, body: content, signal });
  if (answer.ok) return answer;
  if (answer.status === 401) keyWanted.value = true;
  const told = (await answer.json().catch(() => ({}))) as ErrorBody;
  throw errorOf(told, answer.status);
}

function errorOf(told: ErrorBody, status: number): ApiError {
  return new ApiError(told.error?.message ?? `The server answered with status ${status}`, status, told.error?.code ?? null);
}
