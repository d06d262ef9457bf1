// A trace as a waterfall over a time axis, and the sentence of where its time went.

import { useState } from "preact/hooks";
import { count, counted, duration, mark, percent } from "./format";
import { type Row, type Share, selfTimes, ticks, tone, tree } from "./spans";
import type { Span, Trace, Value } from "./types";

const TICKS = 6;
const MOST_EVENTS = 200;
const STEPS_NAMED = 3;
const LEAST_SHARE = 0.005;
/** A mark behind this part of the axis has no room for its text. */
const LAST_LABEL = 0.9;

interface Bounds {
  start: number;
  length: number;
}

function boundsOf(spans: Span[]): Bounds {
  const start = Math.min(...spans.map((span) => span.start_ns));
  const end = Math.max(...spans.map((span) => span.end_ns));
  return { start, length: Math.max(1, end - start) };
}

interface Props {
  trace: Trace;
  /** Next to a chat's answer: no title, no legend. */
  isSmall?: boolean;
}

export function Waterfall({ trace, isSmall = false }: Props) {
  const [open, setOpen] = useState<ReadonlySet<string>>(new Set());
  if (!trace.spans.length) return <p class="empty">The trace has no spans yet.</p>;
  const bounds = boundsOf(trace.spans);
  const toggle = (id: string) => {
    const next = new Set(open);
    if (!next.delete(id)) next.add(id);
    setOpen(next);
  };
  return (
    <div class={`waterfall ${isSmall ? "compact" : ""}`}>
      <WhereTimeWent shares={selfTimes(trace.spans)} bounds={bounds} spans={trace.spans} />
      <Axis length={bounds.length} />
      <div class="rows" role="group" aria-label="Spans" onKeyDown={moveFocus}>
        {tree(trace.spans).map((row) => (
          <SpanRow key={row.span.span_id} row={row} bounds={bounds}
            isOpen={open.has(row.span.span_id)} onToggle={() => toggle(row.span.span_id)} />
        ))}
      </div>
      {trace.dropped_spans > 0 && <p class="dim">{counted(trace.dropped_spans, "span")} {trace.dropped_spans === 1 ? "was" : "were"} dropped.</p>}
    </div>
  );
}

/** Arrow keys go from span to span. */
function moveFocus(event: KeyboardEvent & { currentTarget: HTMLElement }): void {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const rows = [...event.currentTarget.querySelectorAll<HTMLElement>("button.span")];
  const next = rows[rows.indexOf(document.activeElement as HTMLElement) + step];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

function Axis({ length }: { length: number }) {
  const marks = ticks(length, TICKS);
  return (
    <div class="axis" aria-hidden="true">
      <span />
      <span class="marks">
        {marks.map((at) => (
          <span key={at} style={{ left: `${(100 * at) / length}%` }}>{at < LAST_LABEL * length && mark(at)}</span>
        ))}
      </span>
      <span />
    </div>
  );
}

interface RowProps {
  row: Row;
  bounds: Bounds;
  isOpen: boolean;
  onToggle(): void;
}

function SpanRow({ row: { span, depth }, bounds, isOpen, onToggle }: RowProps) {
  const left = (100 * (span.start_ns - bounds.start)) / bounds.length;
  const width = (100 * (span.end_ns - span.start_ns)) / bounds.length;
  const isError = span.status === "error";
  return (
    <>
      <button class={`span ${isError ? "failed" : ""}`} aria-expanded={isOpen} onClick={onToggle}>
        <span class="name" style={{ paddingLeft: `${12 * Math.min(depth, 6)}px` }}>
          <i class={`dot ${tone(span.service)}`} aria-hidden="true" />
          {span.name} <span class="dim">{span.service}</span>
        </span>
        <span class="lane" aria-hidden="true">
          {ticks(bounds.length, TICKS).map((at) => (
            <i key={at} class="grid" style={{ left: `${(100 * at) / bounds.length}%` }} />
          ))}
          <span class={`bar ${tone(span.service)}`} style={{ left: `${left}%`, width: `${width}%` }} />
        </span>
        <span class="num">{duration(span.end_ns - span.start_ns)}</span>
      </button>
      {isOpen && <Detail span={span} bounds={bounds} />}
    </>
  );
}

function show(value: Value): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function Detail({ span, bounds }: { span: Span; bounds: Bounds }) {
  const events = span.events.slice(0, MOST_EVENTS);
  return (
    <div class="detail">
      <dl>
        <dt>begins</dt><dd>+{duration(span.start_ns - bounds.start)}</dd>
        <dt>process</dt><dd>{span.instance || span.service}</dd>
        {span.status !== "unset" && <><dt>status</dt><dd>{span.status} {span.status_message}</dd></>}
        {Object.entries(span.attributes).map(([name, value]) => (
          <><dt>{name}</dt><dd>{show(value)}</dd></>
        ))}
      </dl>
      {events.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label={`Events of ${span.name}`}>
          <table>
            <thead><tr><th scope="col">at</th><th scope="col">event</th><th scope="col">attributes</th></tr></thead>
            <tbody>
              {events.map((event, index) => (
                <tr key={index}>
                  <td class="num">+{duration(event.time_ns - bounds.start)}</td>
                  <td>{event.name}</td>
                  <td>{Object.entries(event.attributes).map(([name, value]) => `${name}=${show(value)}`).join("  ")}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {span.events.length > MOST_EVENTS && <p class="dim">{count(span.events.length - MOST_EVENTS)} more events.</p>}
    </div>
  );
}

interface TimeProps {
  shares: Share[];
  bounds: Bounds;
  spans: Span[];
}

/** Each moment counts for the deepest span that runs then. */
function WhereTimeWent({ shares, bounds, spans }: TimeProps) {
  const named = shares.slice(0, STEPS_NAMED).filter((each) => each.share >= LEAST_SHARE);
  const failed = spans.filter((span) => span.status === "error").length;
  return (
    <div class="where">
      <p>
        <b>{duration(bounds.length)}</b> in {count(spans.length)} spans{failed > 0 && `, ${failed} failed`}:{" "}
        {named.map((each) => `${percent(each.share)} in ${each.name} (${each.service})`).join(", ")}.
      </p>
      <div class="shares" aria-hidden="true">
        {shares.filter((each) => each.share >= LEAST_SHARE).map((each) => (
          <span key={each.name + each.service} class={`bar ${tone(each.service)}`} style={{ flexGrow: each.share }}
            title={`${each.name} (${each.service}): ${duration(each.ns)}`}>
            {each.share > 0.17 && `${each.name} ${percent(each.share)}`}
          </span>
        ))}
      </div>
    </div>
  );
}
