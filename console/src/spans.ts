// The tree of a trace's spans, and where the time of a trace went.

import type { Span } from "./types";

export interface Row {
  span: Span;
  depth: number;
}

/** Parents before children, siblings by start; a span without its parent stands at the top. */
export function tree(spans: Span[]): Row[] {
  const known = new Set(spans.map((span) => span.span_id));
  const children = new Map<string | null, Span[]>();
  const ordered = [...spans].sort((a, b) => a.start_ns - b.start_ns || b.end_ns - a.end_ns);
  for (const span of ordered) {
    const parent = span.parent_id !== null && known.has(span.parent_id) ? span.parent_id : null;
    const siblings = children.get(parent);
    if (siblings) siblings.push(span);
    else children.set(parent, [span]);
  }
  const rows: Row[] = [];
  const stack: Row[] = (children.get(null) ?? []).map((span) => ({ span, depth: 0 })).reverse();
  for (let row = stack.pop(); row; row = stack.pop()) {
    rows.push(row);
    const { span, depth } = row;
    const below = children.get(span.span_id) ?? [];
    children.delete(span.span_id);
    stack.push(...below.map((child) => ({ span: child, depth: depth + 1 })).reverse());
  }
  return rows;
}

export interface Share {
  name: string;
  service: string;
  ns: number;
  share: number;
}

const MOST_SPANS = 2000;

/**
 * Each moment counts for the deepest span that runs then; of spans of one depth for the one that
 * began last. Largest first.
 */
export function selfTimes(spans: Span[]): Share[] {
  const rows = tree(spans.slice(0, MOST_SPANS));
  const borders = [...new Set(rows.flatMap(({ span }) => [span.start_ns, span.end_ns]))];
  borders.sort((a, b) => a - b);
  const best: (Row | undefined)[] = new Array(borders.length);
  const place = new Map(borders.map((border, index) => [border, index]));
  for (const row of rows) {
    const end = place.get(row.span.end_ns) ?? 0;
    for (let index = place.get(row.span.start_ns) ?? 0; index < end; index += 1) {
      const other = best[index];
      if (!other || row.depth > other.depth ||
        (row.depth === other.depth && row.span.start_ns >= other.span.start_ns)) {
        best[index] = row;
      }
    }
  }
  const times = new Map<string, Share>();
  let total = 0;
  best.forEach((row, index) => {
    if (!row) return;
    const ns = (borders[index + 1] ?? 0) - (borders[index] ?? 0);
    const { name, service } = row.span;
    const found = times.get(`${name}\n${service}`);
    if (found) found.ns += ns;
    else times.set(`${name}\n${service}`, { name, service, ns, share: 0 });
    total += ns;
  });
  const shares = [...times.values()].sort((a, b) => b.ns - a.ns);
  return shares.map((each) => ({ ...each, share: each.ns / Math.max(1, total) }));
}

/** Round distances for the time axis, at most `most` of them. */
export function ticks(length_ns: number, most: number): number[] {
  const least = length_ns / most;
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least) ?? least;
  const found: number[] = [];
  for (let at = 0; at < length_ns; at += step) found.push(at);
  return found;
}

/** The color of a service is the same in all views. */
export function tone(service: string): string {
  const known = ["gateway", "tokenizer", "encoder", "scheduler", "worker"];
  return known.find((each) => service.includes(each)) ?? "other";
}
