// One answer: its text, its tool calls, its numbers, and its trace.

import { useState } from "preact/hooks";
import type { Answer, ToolCall, ToolResult } from "./conversation";
import { count, counted, duration } from "./format";
import { Waterfall } from "./waterfall";

const NS_PER_MS = 1e6;

interface Props {
  answer: Answer;
  isLast: boolean;
  onResults(results: ToolResult[]): void;
}

export function AnswerView({ answer, isLast, onResults }: Props) {
  const waits = isLast && !answer.isRunning && answer.calls.length > 0 && !answer.error;
  return (
    <div class="entry answer">
      <div class="said">
        {answer.reasoning && (
          <details class="reasoning" open={answer.isRunning && !answer.text}>
            <summary>Reasoning</summary>
            <div class="text">{answer.reasoning}</div>
          </details>
        )}
        <Text text={answer.text} isRunning={answer.isRunning} />
        {answer.calls.map((each) => (
          <div class="call" key={each.id}>
            <span class="dim">calls</span> <code>{each.name}</code>
            <pre>{each.arguments}</pre>
          </div>
        ))}
        {waits && <Results calls={answer.calls} onResults={onResults} />}
        {answer.error && <p class="error" role="alert">{answer.error}</p>}
        {answer.warning && <p class="dim">{answer.warning}</p>}
        <Numbers answer={answer} />
      </div>
      <aside class="trace" aria-label="Trace of the answer">
        {answer.trace ? (
          <>
            <Waterfall trace={answer.trace} isSmall />
            <a href={`#/requests/${encodeURIComponent(answer.id)}`}>Open this request</a>
          </>
        ) : (
          <p class="dim">{answer.isRunning || answer.awaitsTrace ? "The trace follows when the answer is complete." : "No trace has arrived."}</p>
        )}
      </aside>
    </div>
  );
}

/** Blocks between lines of three backticks are shown as code; all of it is inserted as text. */
function Text({ text, isRunning }: { text: string; isRunning: boolean }) {
  const parts = text.split(/^```[^\n]*\n?/m);
  return (
    <div class={`text ${isRunning ? "unfinished" : ""}`} aria-busy={isRunning}>
      {parts.map((part, index) => (index % 2 ? <pre key={index}>{part}</pre> : part && <span key={index}>{part}</span>))}
    </div>
  );
}

interface Speed {
  first_ns: number;
  /** From the first token to the last one. */
  decode_ns: number;
}

/**
 * From the trace, where it has come: a browser may get many tokens at once. All decoding counts, as
 * a stream may have continued on another worker.
 */
function speedOf(answer: Answer): Speed | null {
  const spans = answer.trace?.spans ?? [];
  const decoding = spans.filter((span) => span.name === "worker.decode");
  const whole = spans.find((span) => span.name === "http");
  if (!whole || !decoding.length) return null;
  const begin = Math.min(...decoding.map((span) => span.start_ns));
  const end = Math.max(...decoding.map((span) => span.end_ns));
  return { first_ns: begin - whole.start_ns, decode_ns: end - begin };
}

function Numbers({ answer }: { answer: Answer }) {
  const speed = speedOf(answer);
  const { first_ms, output_tokens, prompt_tokens, cached_tokens, finish } = answer;
  const facts = [
    speed && `first token ${duration(speed.first_ns)}`,
    !speed && first_ms !== null && `first token seen after ${duration(first_ms * NS_PER_MS)}`,
    output_tokens > 0 && counted(output_tokens, "token"),
    speed && speed.decode_ns > 0 && output_tokens > 1 &&
      `${count(((output_tokens - 1) * 1e9) / speed.decode_ns)} tokens/s`,
    prompt_tokens > 0 && `prompt ${count(prompt_tokens)}${cached_tokens ? `, ${count(cached_tokens)} cached` : ""}`,
    finish && finish !== "stop" && `ended: ${finish}`,
  ].filter(Boolean);
  return facts.length > 0 ? <p class="numbers dim">{facts.join(" · ")}</p> : null;
}

interface ResultsProps {
  calls: ToolCall[];
  onResults(results: ToolResult[]): void;
}

/** The user plays the tools: a result for each call continues the conversation. */
function Results({ calls, onResults }: ResultsProps) {
  const [texts, setTexts] = useState<string[]>(calls.map(() => ""));
  return (
    <form class="results" onSubmit={(event) => {
      event.preventDefault();
      onResults(calls.map((call, index) => ({ kind: "result", call, text: texts[index] ?? "" })));
    }}>
      {calls.map((each, index) => (
        <label key={each.id}>Result of {each.name}
          <input value={texts[index]} placeholder="such as: 21 degrees, sunny"
            onInput={(event) => setTexts(texts.map((text, at) => (at === index ? event.currentTarget.value : text)))} />
        </label>
      ))}
      <button type="submit">Send {calls.length > 1 ? "results" : "result"}</button>
    </form>
  );
}
