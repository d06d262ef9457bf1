// The gateway's API: requests with the user's key, and the events that an open page follows.

import type { ConsoleState, ModelUsage, TenantUsage, Trace, TraceSummary } from "./types";

const KEY = "tokenmesh.key";
const FIRST_PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 15000;

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    /** The key to its trace. */
    readonly request_id: string,
  ) {
    super(message);
  }
}

/** The key is kept for this tab only. */
export function apiKey(): string {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key: string): void {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Sends a request. Throws ApiError with the gateway's message unless the answer is a success. */
export async function call(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (apiKey()) headers.set("Authorization", `Bearer ${apiKey()}`);
  const response = await fetch(path, { ...init, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the gateway answered HTTP ${response.status}`;
  throw new ApiError(response.status, String(message), response.headers.get("x-request-id") ?? "");
}

async function json<T>(path: string): Promise<T> {
  return (await (await call(path)).json()) as T;
}

export interface TraceQuery {
  status?: string;
  model?: string;
  tenant?: string;
  since_s?: number;
  min_ms?: number;
  limit?: number;
}

export async function listTraces(query: TraceQuery): Promise<TraceSummary[]> {
  const words = new URLSearchParams({ requests_only: "true" });
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== "") words.set(name, String(value));
  }
  return (await json<{ traces: TraceSummary[] }>(`traces?${words}`)).traces;
}

export function getTrace(id: string): Promise<Trace> {
  return json<Trace>(`traces/${encodeURIComponent(id)}`);
}

/** What tenants have used in a month, such as 2026-11: all of them, or the key's own. */
export async function listUsage(isAdmin: boolean, month: string): Promise<TenantUsage[]> {
  const words = month ? `?month=${encodeURIComponent(month)}` : "";
  if (!isAdmin) return [await json<TenantUsage>(`v1/usage${words}`)];
  return (await json<{ data: TenantUsage[] }>(`v1/usage/tenants${words}`)).data;
}

export function sumModels(usages: TenantUsage[]): ModelUsage[] {
  const sums = new Map<string, ModelUsage>();
  for (const each of usages.flatMap((usage) => usage.models)) {
    const sum = sums.get(each.model) ?? {
      model: each.model,
      requests: 0,
      prompt_tokens: 0,
      cached_tokens: 0,
      completion_tokens: 0,
    };
    sum.requests += each.requests;
    sum.prompt_tokens += each.prompt_tokens;
    sum.cached_tokens += each.cached_tokens;
    sum.completion_tokens += each.completion_tokens;
    sums.set(each.model, sum);
  }
  return [...sums.values()];
}

/** Data of server-sent events, as they come. */
export async function* events(response: Response): AsyncGenerator<string> {
  if (response.body === null) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += value;
    const frames = waiting.split("\n\n");
    waiting = frames.pop() ?? "";
    for (const frame of frames) {
      const lines = frame.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

export interface Follower {
  onState(state: ConsoleState): void;
  /** Null while the connection is there. */
  onError(error: Error | null): void;
}

/** Follows the mesh until `signal` aborts; connects again after errors, and not while hidden. */
export async function follow(follower: Follower, signal: AbortSignal): Promise<void> {
  let pause_ms = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    await visible(signal);
    const hidden = new AbortController();
    const leave = () => document.hidden && hidden.abort();
    document.addEventListener("visibilitychange", leave);
    try {
      const both = AbortSignal.any([signal, hidden.signal]);
      const response = await call("console/events", { signal: both });
      follower.onError(null);
      for await (const data of events(response)) {
        pause_ms = FIRST_PAUSE_MS;
        follower.onState(JSON.parse(data) as ConsoleState);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (!hidden.signal.aborted) {
        follower.onError(error as Error);
        if (error instanceof ApiError && error.status === 401) return;
        await sleep(pause_ms, signal);
        pause_ms = Math.min(2 * pause_ms, LONGEST_PAUSE_MS);
      }
    } finally {
      document.removeEventListener("visibilitychange", leave);
    }
  }
}

function visible(signal: AbortSignal): Promise<void> {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    const check = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener("visibilitychange", check);
      resolve();
    };
    document.addEventListener("visibilitychange", check);
    signal.addEventListener("abort", check, { once: true });
  });
}

export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    }, { once: true });
  });
}
