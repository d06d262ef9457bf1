// A conversation with one model: what was said, and how the next answer is read.

import { ApiError, call, events, getTrace, sleep } from "./api";
import type { Trace } from "./types";

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Answer {
  kind: "answer";
  /** Of the response; the key to its trace. */
  id: string;
  isRunning: boolean;
  text: string;
  reasoning: string;
  calls: ToolCall[];
  error: string;
  finish: string;
  warning: string;
  first_ms: number | null;
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  trace: Trace | null;
  /** Whether the gateway may still have to receive its spans. */
  awaitsTrace: boolean;
}

export interface Question {
  kind: "question";
  text: string;
  /** As data URLs. */
  images: string[];
}

export interface ToolResult {
  kind: "result";
  call: ToolCall;
  text: string;
}

export type Entry = Question | Answer | ToolResult;

export interface Options {
  system: string;
  temperature: string;
  max_tokens: string;
  /** JSON; empty: no tools. */
  tools: string;
}

const TRACE_PAUSES_MS = [350, 400, 600, 1000, 2000];
const PATH = "v1/chat/completions";

export function newAnswer(): Answer {
  return {
    kind: "answer", id: "", isRunning: true, text: "", reasoning: "", calls: [], error: "", finish: "",
    warning: "", first_ms: null, prompt_tokens: 0, cached_tokens: 0, output_tokens: 0, trace: null, awaitsTrace: true,
  };
}

/** The tools of a text. Throws an Error that says what is wrong. */
export function parseTools(text: string): unknown[] {
  if (!text.trim()) return [];
  let tools: unknown;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`the tools are not JSON: ${(error as Error).message}`);
  }
  if (!Array.isArray(tools)) throw new Error("the tools are not a list");
  return tools;
}

function messages(entries: Entry[], system: string): unknown[] {
  const found: unknown[] = system.trim() ? [{ role: "system", content: system }] : [];
  for (const entry of entries) {
    if (entry.kind === "question") {
      const images = entry.images.map((url) => ({ type: "image_url", image_url: { url } }));
      const content = images.length ? [...images, { type: "text", text: entry.text }] : entry.text;
      found.push({ role: "user", content });
    } else if (entry.kind === "result") {
      found.push({ role: "tool", tool_call_id: entry.call.id, content: entry.text });
    } else if (entry.text || entry.calls.length) {
      const calls = entry.calls.map(({ id, ...rest }) => ({ id, type: "function", function: rest }));
      const content = entry.text || null;
      found.push({ role: "assistant", content, ...(calls.length ? { tool_calls: calls } : {}) });
    }
  }
  return found;
}

interface Chunk {
  error?: { message: string };
  usage?: {
    prompt_tokens: number;
    completion_tokens: number;
    prompt_tokens_details?: { cached_tokens: number } | null;
  } | null;
  choices?: {
    finish_reason: string | null;
    delta: {
      content?: string | null;
      reasoning?: string | null;
      tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
    };
  }[];
}

/**
 * Streams an answer to the entries. `onChange` gets a new copy after each chunk, and once more
 * when the trace is there.
 */
export async function ask(
  model: string,
  entries: Entry[],
  options: Options,
  signal: AbortSignal,
  onChange: (answer: Answer) => void,
): Promise<void> {
  let answer = newAnswer();
  const began_ms = performance.now();
  const change = (part: Partial<Answer>) => {
    answer = { ...answer, ...part };
    onChange(answer);
  };
  try {
    const tools = parseTools(options.tools);
    const body = {
      model,
      messages: messages(entries, options.system),
      stream: true,
      stream_options: { include_usage: true },
      ...(options.temperature.trim() ? { temperature: Number(options.temperature) } : {}),
      ...(options.max_tokens.trim() ? { max_completion_tokens: Number(options.max_tokens) } : {}),
      ...(tools.length ? { tools } : {}),
    };
    const headers = { "Content-Type": "application/json" };
    const response = await call(PATH, { method: "POST", headers, body: JSON.stringify(body), signal });
    change({
      id: response.headers.get("x-request-id") ?? "",
      warning: response.headers.get("x-tokenmesh-warning") ?? "",
    });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      change(grown(answer, JSON.parse(data) as Chunk, performance.now() - began_ms));
    }
    change({ isRunning: false });
  } catch (error) {
    const isStopped = signal.aborted;
    if (error instanceof ApiError) change({ id: error.request_id });
    change({ isRunning: false, ...(isStopped ? { finish: "stopped" } : { error: (error as Error).message }) });
  }
  for (const pause_ms of TRACE_PAUSES_MS) {
    if (!answer.id) break;
    await sleep(pause_ms);
    const trace = await getTrace(answer.id).catch(() => null);
    if (trace?.spans.some((span) => span.name === "http")) {
      onChange({ ...answer, trace, awaitsTrace: false });
      return;
    }
  }
  onChange({ ...answer, awaitsTrace: false });
}

function grown(answer: Answer, chunk: Chunk, now_ms: number): Partial<Answer> {
  if (chunk.error) throw new Error(chunk.error.message);
  const part: Partial<Answer> = {};
  if (chunk.usage) {
    part.prompt_tokens = chunk.usage.prompt_tokens;
    part.cached_tokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    part.output_tokens = chunk.usage.completion_tokens;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return part;
  const { content, reasoning, tool_calls } = choice.delta;
  if (content) part.text = answer.text + content;
  if (reasoning) part.reasoning = answer.reasoning + reasoning;
  if (tool_calls) part.calls = withParts(answer.calls, tool_calls);
  if (choice.finish_reason) part.finish = choice.finish_reason;
  const hasBegun = content || reasoning || tool_calls?.length;
  if (hasBegun && answer.first_ms === null) part.first_ms = now_ms;
  return part;
}

function withParts(
  calls: ToolCall[],
  parts: { index: number; id?: string; function?: { name?: string; arguments?: string } }[],
): ToolCall[] {
  const found = calls.map((each) => ({ ...each }));
  for (const part of parts) {
    const known = (found[part.index] ??= { id: "", name: "", arguments: "" });
    known.id ||= part.id ?? "";
    known.name ||= part.function?.name ?? "";
    known.arguments += part.function?.arguments ?? "";
  }
  return found;
}
